"""Which pictures of an episode the generator is shown."""

from __future__ import annotations

from trainer.search.records import Trajectory


def evidence(trajectory: Trajectory, max_images: int, crop_slots: int) -> list[str]:
    """SHA-256 of the pictures, each once: pages in the order in which they were shown, then crops.

    Crops keep up to `crop_slots` of the `max_images` places, as many as there are; pages may take
    what crops leave, and crops what pages leave. Too many pages: the first stay. Too many crops:
    the last stay, which a policy has come to by the others. A page that was shown in several sizes
    has several pictures, and stands for itself once, as it was first shown.
    """
    views = [view for turn in trajectory.turns for view in turn.views]
    first = {view.page_id: view.image for view in reversed(views) if view.kind == "page"}
    seen = [view.page_id for view in views if view.kind == "page"]
    pages = list(dict.fromkeys(first[page] for page in dict.fromkeys(seen)))
    crops = [view.image for view in views if view.kind == "crop" and view.image not in pages]
    crops = list(dict.fromkeys(crops))
    kept = min(len(crops), crop_slots, max_images)
    pages = pages[: max_images - kept]
    room = max_images - len(pages)
    return pages + (crops[-room:] if room else [])
