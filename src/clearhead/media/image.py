"""Images: resized, cropped and normalised as a model was trained to see them.

x = (pixels * rescale - mean) / std, [channels, height, width]; the numbers come with the model, in
preprocessor_config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.config import Spec
from clearhead.errors import ClearheadError, require


@dataclass(frozen=True)
class ImageProcessor(Spec, kind="image_processor"):
    """How a picture becomes the numbers of one model."""

    size: int = 224
    """Pixels of a side of what the model sees."""
    shortest: bool = False
    """Resize the shorter side to `resize` and crop the middle (CLIP), rather than squeeze to a
    square (ViT).
    """
    resize: int | None = None
    """Pixels of the shorter side before the crop; None: `size`."""
    filter: int = 2
    """Pillow's number of the resizing filter: 2 bilinear, 3 bicubic."""
    rescale: float = 1 / 255
    """Multiplies the bytes."""
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    """Subtracted from each colour."""
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    """Divides each colour."""

    def __post_init__(self) -> None:
        require(0 <= self.filter <= 5, f"The resizing filter is {self.filter}: Pillow has 0 to 5.")
        require(self.size >= 1, f"An image has 1 pixel or more to a side, not {self.size}.")

    def __call__(self, image: Any) -> Float[Tensor, "c h w"]:
        """A picture (a path, or what Pillow opened) as numbers (extra: image)."""
        picture = self._shaped(_opened(image))
        width, height = picture.size
        pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
        x = pixels.view(height, width, 3).permute(2, 0, 1).float() * self.rescale
        mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (self.mean, self.std))
        return (x - mean) / std

    def _shaped(self, picture: Any) -> Any:
        if not self.shortest:
            return picture.resize((self.size, self.size), self.filter)
        short, (width, height) = self.resize or self.size, picture.size
        if width <= height:
            width, height = short, int(short * height / width)
        else:
            width, height = int(short * width / height), short
        picture = picture.resize((width, height), self.filter)
        left, top = (width - self.size) // 2, (height - self.size) // 2
        return picture.crop((left, top, left + self.size, top + self.size))

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> ImageProcessor:
        """Their preprocessor_config.json in our words."""
        for name in ("do_resize", "do_rescale", "do_normalize"):
            require(
                hf.get(name, True) is True,
                f"preprocessor_config.json says {name} = {hf[name]!r}, and only true is supported."
                if name in hf
                else "",
            )
        size = hf.get("size") or 224
        crop = hf.get("crop_size") if hf.get("do_center_crop") else None
        edge = size if isinstance(size, int) else size.get("shortest_edge", size.get("height", 224))
        seen = edge if crop is None else crop if isinstance(crop, int) else crop.get("height", edge)
        said = {
            "size": seen,
            "shortest": crop is not None,
            "resize": edge,
            "filter": hf.get("resample", 2),
            "rescale": hf.get("rescale_factor", 1 / 255),
            "mean": hf.get("image_mean") or (0.5,) * 3,
            "std": hf.get("image_std") or (0.5,) * 3,
        }
        return cls.from_dict(said, "preprocessor_config.json")


def _opened(image: Any) -> Any:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise ClearheadError(
            "Reading images needs the package Pillow: pip install 'clearhead[image]'."
        ) from error
    if not isinstance(image, (str, Path)):
        require(
            isinstance(image, Image.Image), f"An image is a path or a Pillow image, not {image!r}."
        )
        return image.convert("RGB")
    require(Path(image).is_file(), f"There is no image at {image}: check the path.")
    try:
        return Image.open(image).convert("RGB")
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
        raise ClearheadError(f"{image} cannot be read as an image ({error}).") from error
