"""Files become records, in a stream; what is no text or no table is refused with its place."""

from __future__ import annotations

import csv
import datetime
import gzip
import io
import json
import os
import pickle
import tracemalloc
import zipfile

import pytest

from clearhead.data import files as files_module
from clearhead.data import readers, tables
from clearhead.data.files import File, find_files
from clearhead.data.readers import MORE, languages, open_files, open_parallel, open_rows, open_texts
from clearhead.errors import ClearheadError


def put(folder, name: str, content: str | bytes) -> File:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return File(path)


def zipped(members: dict[str, str | bytes], packing: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", packing) as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content, packing)
    return file.getvalue()


def read(path) -> list[dict]:
    return list(open_files(find_files(path), str(path)))


# --- text ---


def test_a_text_comes_back_whole_without_its_mark(tmp_path):
    file = put(tmp_path, "a.txt", b"\xef\xbb\xbfna\xc3\xafve\r\ntext\rend")
    assert read(file.path) == [{"text": "naïve\ntext\nend"}]
    assert read(file.path)[0]["text"] == file.path.read_text(encoding="utf-8-sig")


def test_long_texts_come_in_pieces_that_end_with_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "PIECE", 10)
    text = "one two\nthree\nfour five six seven eight\nnine\n"
    put(tmp_path, "a.txt", text)
    put(tmp_path, "b.txt", "short")
    records = read(tmp_path)
    assert "".join(record["text"] for record in records) == text + "short"
    assert all(len(record["text"]) <= 10 for record in records)
    assert records[0] == {"text": "one two\n", MORE: True}
    assert [r["text"] for r in records if not r.get(MORE)] == ["nine\n", "short"]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
def test_characters_may_lie_across_blocks(tmp_path, monkeypatch, size):
    monkeypatch.setattr(files_module, "BLOCK", size)
    text = "aé€😀\r\nü\rß\n"
    file = put(tmp_path, "a.txt", text)
    assert "".join(file.text()) == text
    assert "".join(file.running()) == "aé€😀\nü\nß\n"
    assert list(file.lines()) == ["aé€😀\r\n", "ü\rß\n"]


@pytest.mark.parametrize("cut", [(0, 5), (3, 11), (7, 7), (9, 14), (0, 14)])
def test_a_part_has_exactly_its_characters(tmp_path, monkeypatch, cut):
    monkeypatch.setattr(readers, "PIECE", 4)
    stream = open_texts([put(tmp_path, "a.txt", "0123456"), put(tmp_path, "b.txt", "789abcd")])
    part = stream.part(*cut)
    assert "".join(r["text"] for r in part) == "0123456789abcd"[slice(*cut)]
    assert part.count == cut[1] - cut[0]


def test_a_part_of_a_part_counts_from_its_own_start(tmp_path):
    stream = open_texts([put(tmp_path, "a.txt", "0123456789")]).part(2, 9)
    assert [r["text"] for r in stream.part(3, 100)] == ["5678"]


def test_folders_are_sorted_walked_and_hidden_files_left_out(tmp_path):
    for name, text in {
        "b.txt": "b",
        "a/z.md": "z",
        "c.py": "c",
        ".git/x": "\0",
        "e.txt": "",
    }.items():
        put(tmp_path, name, text)
    assert [r["text"] for r in read(tmp_path)] == ["z", "b", "c"]
    assert [r["text"] for r in read(f"{tmp_path}/**/*.md")] == ["z"]
    assert [r["text"] for r in read(f"{tmp_path}/?.txt")] == ["b"]


def test_gzip_and_zip_are_read_where_they_lie(tmp_path):
    put(tmp_path, "a.txt.gz", "packed")
    put(tmp_path, "a.jsonl.gz", '{"n": 1}\n')
    assert read(tmp_path / "a.txt.gz") == [{"text": "packed"}]
    assert read(tmp_path / "a.jsonl.gz") == [{"n": 1}]
    with zipfile.ZipFile(tmp_path / "z.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("../../up.txt", "never written")
        archive.writestr("b/two.txt.gz", gzip.compress(b"two"))
        archive.writestr("__MACOSX/b", b"\0")
    before = sorted(tmp_path.parent.rglob("*"))
    assert [r["text"] for r in read(tmp_path / "z.zip")] == ["never written", "two"]
    assert sorted(tmp_path.parent.rglob("*")) == before


def test_a_zip_of_many_files_is_opened_once(tmp_path, monkeypatch):
    opened = []

    class Counted(files_module._Archive):
        def __init__(self, path):
            opened.append(path)
            super().__init__(path)

    monkeypatch.setattr(files_module, "_Archive", Counted)
    path = tmp_path / "z.zip"
    path.write_bytes(zipped({f"{n:03}.txt": f"text {n}" for n in range(200)} | {"empty.txt": ""}))
    stream = open_files(find_files(path), "z")
    assert [r["text"] for r in stream] == [f"text {n}" for n in range(200)]
    assert opened == [path]
    path.write_bytes(zipped({"a.txt": "another"}))  # what is kept is not shown for a new file
    assert read(path) == [{"text": "another"}]


def test_packed_and_plain_have_one_fingerprint_and_other_text_another(tmp_path):
    plain = open_texts([put(tmp_path, "a.txt", "same")]).fingerprint
    assert open_texts([put(tmp_path, "b.txt.gz", "same")]).fingerprint == plain
    assert open_texts([put(tmp_path, "c.txt", "sane")]).fingerprint != plain
    two = open_texts([put(tmp_path, "d.txt", "sa"), put(tmp_path, "e.txt", "me")])
    assert two.fingerprint != plain


@pytest.mark.parametrize("name", ["big.txt.gz", "big.jsonl.gz", "big.csv.gz", "big.json.gz"])
def test_a_large_file_is_never_in_memory(tmp_path, monkeypatch, name):
    monkeypatch.setattr(files_module, "BLOCK", 2**14)
    monkeypatch.setattr(readers, "PIECE", 2**14)
    text = "text of a record, and some more of it, so that there is enough " * 16
    line = {"jsonl": json.dumps({"text": text}), "json": f",{json.dumps(text)}"}
    rows = [line.get(name.split(".")[1], text.replace(",", ""))] * 4000
    start, end = ("[" + json.dumps(text), "]") if ".json." in name else ("text", "")
    put(tmp_path, name, "\n".join([*([start] if "jsonl" not in name else []), *rows, end]))
    found = find_files(tmp_path / name)
    tracemalloc.start()
    stream = open_files(found, name)
    length = sum(len(record["text"]) for record in stream)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert length > 3_900_000 > 8 * peak


def test_streams_can_be_sent_to_other_processes(tmp_path):
    put(tmp_path, "a.csv", "text,label\nx,1\ny,2\n")
    stream = open_files(find_files(tmp_path / "a.csv"), "a").part(1, 2)
    assert list(pickle.loads(pickle.dumps(stream))) == list(stream) == [{"text": "y", "label": "2"}]


# --- tables ---


def test_json_lines(tmp_path):
    put(tmp_path, "a.jsonl", '{"text": "a", "n": 1}\n\n{"text": "b", "n": [2]}')
    put(tmp_path, "b.ndjson", '"only a string"\n')
    assert read(tmp_path / "a.jsonl") == [{"text": "a", "n": 1}, {"text": "b", "n": [2]}]
    assert read(tmp_path / "b.ndjson") == [{"text": "only a string"}]


@pytest.mark.parametrize("block", [7, 64, 2**20])
def test_json_lists_are_read_item_by_item(tmp_path, monkeypatch, block):
    monkeypatch.setattr(files_module, "BLOCK", block)
    items = [{"text": "x" * n, "deep": {"n": [n, None]}} for n in range(40)]
    put(tmp_path, "a.json", json.dumps(items, indent=1))
    assert read(tmp_path / "a.json") == items


def test_what_waits_is_not_copied_for_every_item_of_a_json_list():
    scan = tables._Scan(iter([json.dumps(list(range(50)))]))
    assert scan.mark() == "["
    text = scan.text
    for number in range(50):
        scan.at += 1
        scan.mark()
        assert scan.item("here") == number
        assert scan.mark() == ("," if number < 49 else "]")
        assert scan.text is text


def test_csv_has_quotes_and_tsv_has_none(tmp_path):
    put(tmp_path, "a.csv", 'text,label\n"two\nlines, ""quoted""",1\n\nplain,2\n')
    put(tmp_path, "b.csv", "text;label\na,b;1\n")
    put(tmp_path, "c.tsv", 'text\tlabel\n"open quote\t1\n')
    assert read(tmp_path / "a.csv")[0] == {"text": 'two\nlines, "quoted"', "label": "1"}
    assert read(tmp_path / "a.csv")[1] == {"text": "plain", "label": "2"}
    assert read(tmp_path / "b.csv") == [{"text": "a,b", "label": "1"}]
    assert read(tmp_path / "c.tsv") == [{"text": '"open quote', "label": "1"}]


def test_a_long_field_is_no_error(tmp_path):
    put(tmp_path, "a.csv", f"text,label\n{'long ' * 50_000},1\n")
    before = csv.field_size_limit()
    stream = iter(open_files(find_files(tmp_path / "a.csv"), "a"))
    assert len(next(stream)["text"]) == 250_000
    assert csv.field_size_limit() == before  # it is the whole process's


def test_the_fingerprint_of_rows_is_the_same_in_every_process():
    def rows(*values):
        return open_rows(lambda: iter([{"text": "a", "other": v} for v in values]), "r").fingerprint

    assert rows(object()) == rows(object())  # their addresses differ
    assert rows(b"a") != rows(b"b")
    assert rows(datetime.date(2000, 1, 1)) != rows(datetime.date(2000, 1, 2))


def test_tables_of_a_folder_follow_each_other(tmp_path):
    put(tmp_path, "1.jsonl", '{"text": "a"}\n')
    put(tmp_path, "2.csv", "text\nb\n")
    assert read(tmp_path) == [{"text": "a"}, {"text": "b"}]


# --- parallel files ---


@pytest.mark.parametrize(
    ("names", "columns"),
    [
        (["train.en", "train.de"], ("en", "de")),
        (["train.en.gz", "train.de"], ("en", "de")),
        (["train.en.txt", "train.de.txt", "train.fr.txt"], ("en", "de", "fr")),
        (["news.pt_BR", "news.zh-CN"], ("pt_BR", "zh-CN")),
        (["x.source", "x.target"], ("source", "target")),
        (["notes.txt", "notes.md"], None),
        (["part.1.txt", "part.2.txt"], None),
        (["a.txt", "b.txt"], None),
        (["a.en", "b.de"], None),
        (["train.en"], None),
        (["train.en", "train.en"], None),
    ],
)
def test_parallel_files_are_known_by_their_names(tmp_path, names, columns):
    assert languages([File(tmp_path / name) for name in names]) == columns


def test_parallel_files_line_by_line(tmp_path):
    pair = [put(tmp_path, "t.en", "a\r\n b \nc\u2028d"), put(tmp_path, "t.de.gz", "A\nB\nC\n")]
    assert list(open_parallel(pair, ("en", "de"))) == [
        {"en": "a", "de": "A"},
        {"en": "b", "de": "B"},
        {"en": "c\u2028d", "de": "C"},
    ]


# --- bad input ---

BAD = {
    "empty.txt": (b"", "is empty"),
    "mark.txt": (b"\xef\xbb\xbf", "is empty"),
    "empty.txt.gz": (b"", "is empty"),
    "empty.jsonl": (b"", "is empty"),
    "blank.jsonl": (b"\n\n", "holds no records"),
    "header.csv": (b"text,label\n", "holds no records"),
    "none.json": (b"[]", "holds no records"),
    "binary.txt": (b"abc\0def", "binary"),
    "binary.csv": (b"a,b\n\0,1\n", "binary"),
    "latin.txt": (b"one\ncaf\xe9\n", r"byte 0xe9 at 7 \(line 2\).*iconv -f WINDOWS-1252"),
    "marked.txt": (b"\xef\xbb\xbfcaf\xe9", "byte 0xe9 at 6"),
    "torn.txt": (b"ab\xe2\x82", "byte 0xe2 at 2"),
    "wide.txt": ("text".encode("utf-16"), "is UTF-16.*iconv -f UTF-16"),
    "wider.txt": ("text".encode("utf-32"), "is UTF-32"),
    "bad.jsonl": (b'{"a": 1}\n{"a": \n', "line 2 is not JSON"),
    "number.jsonl": (b'{"a": 1}\n7\n', "line 2 is 7; a record"),
    "list.jsonl": (b"[]\n", "a record is an object"),
    "object.json": (b'{"a": 1}', "no JSON list.*jsonl"),
    "torn.json": (b'[{"a": 1}, {"a": ', "item 2 is not JSON"),
    "behind.json": (b'[{"a": 1}] x', "goes on behind"),
    "number.json": (b'[{"a": 1}, 3]', "item 2 is 3"),
    "comma.json": (b'[{"a": 1} {"a": 2}]', "behind item 1 stands '{', but a comma"),
    "commas.json": (b'[{"a": 1},, {"a": 2}]', "item 2 is not JSON"),
    "last.json": (b'[{"a": 1},]', "item 2 is not JSON"),
    "open.json": (b'[{"a": 1}', "behind item 1 the file ends"),
    "wide.csv": (b"a,b\n1,2\n1,2,3\n", r"line 3 has 3 columns, but the header has 2 \(a, b\)"),
    "narrow.tsv": (b"a\tb\n1\n", "line 2 has 1 columns"),
    "twice.csv": (b"a,a\n1,2\n", "'a' stands there twice"),
    "nameless.csv": (b"a,\n1,2\n", "one is empty"),
    "quote.csv": (b'a,b\n"open,1\nx,2\n', "Is a quote open"),
    "deep.jsonl": (b"[" * 200_000, "line 1 is not JSON"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_before_any_work(tmp_path, name):
    content, said = BAD[name]
    file = put(tmp_path, name, content)
    with pytest.raises(ClearheadError, match=said) as error:
        open_files(find_files(file.path), str(file.path))
    assert name in str(error.value)


@pytest.mark.parametrize("name", ["a.txt.gz", "a.zip"])
def test_broken_archives(tmp_path, name):
    (tmp_path / name).write_bytes(b"this is not packed at all")
    with pytest.raises(ClearheadError, match="read"):
        find_files(tmp_path / name)


def test_torn_archives(tmp_path):
    packed = gzip.compress(os.urandom(5000).hex().encode())
    (tmp_path / "a.txt.gz").write_bytes(packed[:-2000])
    with pytest.raises(ClearheadError, match="cannot be read"):
        read(tmp_path / "a.txt.gz")


@pytest.mark.parametrize("name", ["bomb.zip", "bomb.txt.gz"])
def test_bombs_are_not_unpacked(tmp_path, monkeypatch, name):
    monkeypatch.setattr(files_module, "FREE", 2**20)
    zeros = b" " * (8 * 2**20)
    if name.endswith("gz"):
        put(tmp_path, name, zeros)
    else:
        with zipfile.ZipFile(tmp_path / name, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a.txt", zeros)
    with pytest.raises(ClearheadError, match="200 times its size"):
        read(tmp_path / name)


def test_the_bound_is_on_all_members_together(tmp_path, monkeypatch):
    monkeypatch.setattr(files_module, "FREE", 2**20)
    inner = gzip.compress(b" " * 700_000)
    path = tmp_path / "two.zip"
    path.write_bytes(zipped({"a.txt.gz": inner}))
    assert len(read(path)[0]["text"]) == len(read(path)[0]["text"]) == 700_000
    path.write_bytes(zipped({"a.txt.gz": inner, "b.txt.gz": inner}))
    with pytest.raises(ClearheadError, match=r"^\S+: b.txt.gz unpacks to more than 200 times"):
        read(path)


@pytest.mark.parametrize(
    "packing", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]
)
def test_no_byte_of_a_zip_can_raise_anything_else(tmp_path, packing):
    whole = zipped({"a.txt": "some text", "b.txt.gz": gzip.compress(b"more")}, packing)
    refused = 0
    for place in range(len(whole)):
        for value in {0xFF, whole[place] ^ 1}:
            path = tmp_path / "z.zip"
            path.write_bytes(whole[:place] + bytes([value]) + whole[place + 1 :])
            os.utime(path, ns=(0, place * 256 + value))
            try:
                read(path)
            except ClearheadError:
                refused += 1
    assert refused > len(whole) / 2
    for length in range(0, len(whole), 3):
        (tmp_path / "torn.zip").write_bytes(whole[:length])
        with pytest.raises(ClearheadError):
            read(tmp_path / "torn.zip")


def test_a_member_that_is_not_there(tmp_path):
    (tmp_path / "z.zip").write_bytes(zipped({"a.txt": "x"}))
    with pytest.raises(ClearheadError, match=r"z\.zip: b\.txt cannot be read"):
        list(File(tmp_path / "z.zip", "b.txt").lines())


def test_missing_things_name_their_neighbours(tmp_path):
    put(tmp_path, "corpus.txt", "x")
    with pytest.raises(ClearheadError, match=r'no file or folder.*mean "corpus\.txt"'):
        find_files(tmp_path / "corpsu.txt")
    with pytest.raises(ClearheadError, match="No file matches"):
        find_files(f"{tmp_path}/*.md")
    (tmp_path / "void").mkdir()
    with pytest.raises(ClearheadError, match="holds no files"):
        find_files(tmp_path / "void")


def test_what_is_no_file_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ClearheadError, match="neither a file nor a folder"):
        find_files(tmp_path / "pipe")


def test_binary_files_of_a_folder_are_listed_together(tmp_path):
    put(tmp_path, "a.txt", "x")
    for number in range(7):
        put(tmp_path, f"{number}.png", b"\x89PNG\0")
    with pytest.raises(ClearheadError, match=r"0\.png.*4\.png and 2 more.*pattern"):
        find_files(tmp_path)


def test_texts_and_tables_do_not_mix(tmp_path):
    put(tmp_path, "README.md", "x")
    put(tmp_path, "data.csv", "a\n1\n")
    with pytest.raises(ClearheadError, match=r"both tables .*data\.csv.* and texts .*README\.md"):
        read(tmp_path)


def test_unequal_parallel_files_say_both_counts(tmp_path):
    pair = [put(tmp_path, "t.en", "a\nb\nc\n"), put(tmp_path, "t.de", "A\nB\n")]
    with pytest.raises(ClearheadError, match=r"t\.en has 3, .*t\.de has 2"):
        open_parallel(pair, ("en", "de"))


def test_a_line_without_end_is_no_record(tmp_path, monkeypatch):
    monkeypatch.setattr(files_module, "BLOCK", 16)
    monkeypatch.setattr(files_module, "LONGEST", 64)
    put(tmp_path, "a.jsonl", "x" * 200)
    with pytest.raises(ClearheadError, match="line of more than 64"):
        read(tmp_path / "a.jsonl")
