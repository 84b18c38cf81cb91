"""Select the images of an episode for the generator."""

from __future__ import annotations

from trainer.search.records import Trajectory


def evidence(trajectory: Trajectory, max_images: int, crop_slots: int) -> list[str]:
    """Return the SHA-256 of the images without duplicates: pages in order, then crops.

    Of `max_images` images, up to `crop_slots` are for crops. Pages may use free slots of crops, and
    crops free slots of pages. Of too many pages the first ones are used, of too many crops the last
    ones, which the policy reached through the earlier ones. A page with images of several sizes
    counts once, with its first image.
    """
    views = [view for turn in trajectory.turns for view in turn.views]
    first = {view.page_id: view.image for view in reversed(views) if view.kind == "page"}
    seen = [view.page_id for view in views if view.kind == "page"]
    pages = list(dict.fromkeys(first[page] for page in dict.fromkeys(seen)))
    crops = [view.image for view in views if view.kind == "crop" and view.image not in pages]
    crops = list(dict.fromkeys(crops))
    num_crops = min(len(crops), crop_slots, max_images)
    pages = pages[: max_images - num_crops]
    free_slots = max_images - len(pages)
    return pages + (crops[-free_slots:] if free_slots else [])
