"""Select the images of an episode for the generator."""

from __future__ import annotations

from scorekit.errors import UserError
from trainer.search.answer.config import GeneratorConfig
from trainer.search.records import ImageView, Trajectory


def evidence(trajectory: Trajectory, max_images: int, crop_slots: int) -> list[ImageView]:
    """Return the views without duplicates: pages in order, then crops.

    Of `max_images` images, up to `crop_slots` are for crops. Pages may use free slots of crops, and
    crops free slots of pages. Of too many pages the first ones are used, of too many crops the last
    ones, which the policy reached through the earlier ones. A page with images of several sizes
    counts once, with its first image.
    """
    views = [view for turn in trajectory.turns for view in turn.views]
    first = {view.page_id: view for view in reversed(views) if view.kind == "page"}
    seen = [view.page_id for view in views if view.kind == "page"]
    pages = _distinct([first[page] for page in dict.fromkeys(seen)])
    page_images = {view.image for view in pages}
    crops = [view for view in views if view.kind == "crop" and view.image not in page_images]
    crops = _distinct(crops)
    num_crops = min(len(crops), crop_slots, max_images)
    pages = pages[: max_images - num_crops]
    free_slots = max_images - len(pages)
    return pages + (crops[-free_slots:] if free_slots else [])


def _distinct(views: list[ImageView]) -> list[ImageView]:
    """Return the first view of each image."""
    first: dict[str, ImageView] = {}
    for view in views:
        first.setdefault(view.image, view)
    return list(first.values())


def evidence_images(trajectory: Trajectory, cfg: GeneratorConfig) -> list[str]:
    """Return the SHA-256 of the images for the generator, in order (`evidence`).

    Raises UserError for an episode that was stored without originals if they are required.
    """
    images = []
    for view in evidence(trajectory, cfg.max_images, cfg.crop_slots):
        image = view.image if cfg.images == "shown" else view.original
        if image is None:
            raise UserError(
                f"answering.generator.images: original, but the episode {trajectory.trajectory_id} "
                f"was stored without the original of page {view.page_id}. Set it to shown, or "
                "begin a new run."
            )
        images.append(image)
    return images
