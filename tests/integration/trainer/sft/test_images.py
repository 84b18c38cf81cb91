"""Check rows of ids with images: the model's input, and which tokens are trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from scorekit.errors import UserError
from tests.kits.trainer.images import IMAGE, KINDS, PROCESSOR, Picture, image_ids, noise_image, tiny
from tests.kits.trainer.runs import letter_tokenizer
from tests.kits.trainer.sft import save_chat_model, sft_config, write_rows
from trainer.rl.model_files import save_tokenizer
from trainer.runs.run_log import read_jsonl
from trainer.sft.collate import Collator
from trainer.sft.run import run_sft


def save_seeing_model(folder: Path, kind: str) -> Path:
    """Save a tiny model that sees, its processor, and a tokenizer that no row needs."""
    model: Any = tiny(kind).float()
    model.save_pretrained(folder)
    PROCESSOR.save_pretrained(folder)
    save_tokenizer(letter_tokenizer(), folder)
    return folder


def row_with(folder: Path, name: str, images: list[Picture], text: list[int]) -> dict[str, Any]:
    """Return a row with a question about images and an answer of two turns."""
    for number, image in enumerate(images):
        (folder / f"{name}{number}.png").write_bytes(image.png)
    seen = [i for image in images for i in image_ids(image.grid)]
    ids = [5, 6, *seen, *text, 7, *text]
    mask = [0] * (2 + len(seen)) + [1] * len(text) + [0] + [1] * len(text)
    names = [f"{name}{number}.png" for number in range(len(images))]
    return {"input_ids": ids, "action_mask": mask, "images": names}


@pytest.fixture
def rows(tmp_path: Path) -> list[dict[str, Any]]:
    return [
        row_with(tmp_path, "a", [noise_image(16, 24, 1), noise_image(8, 16, 2)], [20, 21]),
        row_with(tmp_path, "b", [], [22, 23, 24]),
        row_with(tmp_path, "c", [noise_image(24, 16, 3)], [25]),
    ]


def loss_by_hand(model: Any, rows: list[dict[str, Any]], folder: Path) -> float:
    """Compute the loss row by row, without padding."""
    from PIL import Image

    losses = []
    for row in rows:
        seen = [Image.open(folder / name).convert("RGB") for name in row["images"]]
        read = dict(PROCESSOR(images=seen, return_tensors="pt")) if seen else {}
        ids = torch.tensor([row["input_ids"]])
        with torch.no_grad():
            logits = model(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                mm_token_type_ids=(ids == IMAGE).long(),
                **read,
            ).logits
        logprobs = logits[0].log_softmax(-1)
        for position, is_trained in enumerate(row["action_mask"]):
            if is_trained:
                losses.append(-logprobs[position - 1, row["input_ids"][position]].item())
    return sum(losses) / len(losses)


@KINDS
def test_rows_with_and_without_images_are_learned_together(
    kind: str, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    model = save_seeing_model(tmp_path / "model", kind)
    path = write_rows(tmp_path / "rows.jsonl", rows)
    cfg = sft_config(
        model,
        path,
        tmp_path / "run",
        data={"train": str(path), "eval": str(path)},
        sft={"max_steps": 2, "per_device_train_batch_size": 3, "learning_rate": 1e-3},
        eval={"batch_size": 2},
    )
    run_sft(cfg)
    expected_loss = loss_by_hand(tiny(kind).float(), rows, tmp_path)
    before, after = read_jsonl(tmp_path / "run/eval.jsonl")
    assert before["loss"] == pytest.approx(expected_loss, abs=1e-4)
    assert read_jsonl(tmp_path / "run/log.jsonl")[0]["loss"] == pytest.approx(
        expected_loss, abs=2e-4
    )
    assert after["loss"] < before["loss"]


def test_an_image_of_another_size_than_its_places_is_refused(
    rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "a0.png").write_bytes(noise_image(32, 32, 1).png)
    row = rows[0] | {"pictures": [tmp_path / name for name in rows[0]["images"]], "where": "row 1"}
    collator = Collator(0, PROCESSOR, IMAGE)
    with pytest.raises(UserError, match="row 1: its images have 18 parts, but"):
        collator([row | {"labels": row["input_ids"]}])


def test_a_file_that_is_no_image_is_refused(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "a0.png").write_bytes(b"no image")
    row = rows[0] | {"pictures": [tmp_path / name for name in rows[0]["images"]], "where": "row 1"}
    with pytest.raises(UserError, match=r"row 1: .*a0.png: cannot be read"):
        Collator(0, PROCESSOR, IMAGE)([row | {"labels": row["input_ids"]}])


def seen_by(folder: Path, name: str) -> torch.Tensor:
    """Return the patches that the collator makes of an image file."""
    row = {"input_ids": [5, *[IMAGE] * 6], "labels": [5] * 7, "where": "row 1"}
    batch = Collator(0, PROCESSOR, IMAGE)([row | {"pictures": [folder / name]}])
    return batch["pixel_values"]


def test_an_image_of_a_row_is_seen_as_a_person_sees_it(tmp_path: Path) -> None:
    """Check that transparency is white, 16 bits keep their grays, and EXIF rotates."""
    gray = np.full((16, 24), 100, np.uint8)
    gray[:8, :8] = 255
    upright = Image.fromarray(gray).convert("RGB")
    upright.save(tmp_path / "upright.png")
    Image.fromarray(gray.astype(np.uint16) << 8).save(tmp_path / "deep.png")
    transparent = upright.convert("RGBA")
    transparent.paste((0, 0, 0, 0), (0, 0, 8, 8))
    transparent.save(tmp_path / "transparent.png")
    exif = Image.Exif()
    exif[0x112] = 6
    upright.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "turned.png", exif=exif)
    upright.save(tmp_path / "page.bmp")
    upright.save(tmp_path / "page.ppm")
    expected = seen_by(tmp_path, "upright.png")
    assert len(expected.unique()) > 2
    for name in ("deep.png", "transparent.png", "turned.png", "page.bmp", "page.ppm"):
        assert torch.equal(seen_by(tmp_path, name), expected), name


def test_images_for_a_model_that_reads_none_are_refused(
    rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", rows)
    cfg = sft_config(save_chat_model(tmp_path / "model"), path, tmp_path / "run")
    with pytest.raises(UserError, match=r"data.train has images, but .* reads none"):
        run_sft(cfg)
