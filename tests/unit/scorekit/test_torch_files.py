"""Check that a file of torch.save is refused before torch unpacks more than the file holds."""

from __future__ import annotations

import tracemalloc
import zipfile

import pytest

from scorekit.errors import UserError
from scorekit.torch_files import check_torch_file, check_weight_files


def _bomb(path, parts: int = 64) -> None:
    """Write a zip of 64 KiB with a part of 64 MiB."""
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("m/data/0", "w") as part,
    ):
        for _ in range(parts):
            part.write(bytes(2**20))


def test_a_compressed_part_is_refused_and_not_unpacked(tmp_path):
    path = tmp_path / "model.ckpt"
    _bomb(path)
    assert path.stat().st_size < 2**17
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=r"'m/data/0' in it is compressed"):
            check_torch_file(path)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_parts_that_claim_more_bytes_than_the_file_are_refused(tmp_path):
    path = tmp_path / "model.ckpt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("m/data/0", bytes(100))
    content = bytearray(path.read_bytes())
    entry = content.index(b"PK\1\2")
    content[entry + 20 : entry + 28] = (2**31).to_bytes(4, "little") * 2
    path.write_bytes(content)
    with pytest.raises(UserError, match="damaged: it has"):
        check_torch_file(path)


@pytest.mark.parametrize("num_bytes", [0, 10, 60])
def test_what_is_no_zip_is_refused(num_bytes, tmp_path):
    path = tmp_path / "model.ckpt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("m/data/0", bytes(100))
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(UserError, match="not a checkpoint that torch can load: cut short"):
        check_torch_file(path)


@pytest.mark.parametrize("offset", range(4, 46))
def test_a_damaged_list_of_parts_is_a_line(offset, tmp_path):
    path = tmp_path / "model.ckpt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("m/data/0", bytes(100))
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\1\2") + offset] ^= 0xFF
    path.write_bytes(content)
    try:
        check_torch_file(path)
    except UserError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-1.bin", "adapter_model.bin"])
def test_a_folder_with_a_packed_weight_file_is_refused(name, tmp_path):
    check_weight_files(tmp_path)
    (tmp_path / "pytorch_model-2.bin").write_bytes(b"\x80\x02 of before torch 1.6")
    check_weight_files(tmp_path)
    _bomb(tmp_path / name, parts=1)
    with pytest.raises(UserError, match=f"{name}: 'm/data/0' in it is compressed"):
        check_weight_files(tmp_path)
