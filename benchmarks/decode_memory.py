"""The peak memory of four beams, for decode.py: ours and transformers', each in a process."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from decode_models import Work

BEAMS = """
import json, sys

def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))

who, folder, new, threads = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
rows = json.load(sys.stdin)
import torch
torch.set_num_threads(threads)
if who == "clearhead":
    import clearhead.api
    imported = status("VmRSS:")
    model = clearhead.api.load(folder)
    texts = [model.tokenizer.decode(row) for row in rows]
    run = lambda: model.translate(texts, beams=4, max_new_tokens=new)
else:
    from transformers import MarianMTModel
    imported = status("VmRSS:")
    net = MarianMTModel.from_pretrained(folder).eval()
    net.generation_config.forced_eos_token_id = None
    ids = torch.tensor(rows)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    run = lambda: net.generate(**given, num_beams=4, max_new_tokens=new, do_sample=False)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak starts again from here
with torch.inference_mode():
    run()
peak = status("VmHWM:")
print(json.dumps({"peak": peak, "above_imports": peak - imported}))
"""


def beam_memory(work: Work, ours: str) -> dict[str, Any]:
    """Peak memory of four beams in bytes: all of the process, and what came after its imports (the
    model, too).
    """
    found = {}
    for who in (ours, "transformers"):
        sizes = [str(work.new), str(work.threads)]
        done = subprocess.run(
            [sys.executable, "-c", BEAMS, who, str(work.hf), *sizes],
            input=json.dumps(work.rows),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0:
            found[who] = json.loads(done.stdout.splitlines()[-1])
        else:
            print(f"{who}: its memory is not known: {done.stderr[-500:]}", file=sys.stderr)
    return {"memory": found}
