"""What is first in each of many queues or groups, in one command.

A scan reads tasks in the order of claiming: if one group has a million tasks in front, it would have to read all of them to
find a task of another group. Here each place costs one look into an index, whatever waits in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from taskmesh.model.worker import Claimant
from taskmesh.store.find import IN_ORDER, KEY_FIELDS, Page, judged
from taskmesh.store.malformed import past_strangers
from taskmesh.store.mongodb.driver import Document
from taskmesh.store.store import Store


@dataclass(frozen=True, slots=True)
class Look:
    """What to read: the first `count` tasks of these names in a queue, or in a group of it, in these lanes (None: all)."""

    queue: str
    group: str | None
    names: Collection[str]
    lanes: Sequence[int] | None
    count: int


async def first_of(store: Store, worker: Claimant | str, looks: Sequence[Look], until: datetime) -> list[Page]:
    """Return, for each look, the first tasks that anybody may claim by then."""
    due: Document = {"next_claim_time": {"$type": "date", "$lte": until}}

    async def read(which: Document) -> list[Page]:
        # Each by itself: the first in the index's order, so that no more is read of it.
        (first, *others) = [_first_of(number, look, which) for number, look in enumerate(looks)]
        stages = [*first, *({"$unionWith": {"coll": store.tasks, "pipeline": stages}} for stages in others)]
        found = await store.driver.rows(store.tasks, stages)
        look_of = {str(row["_id"]): row.pop("look") for row in found}
        read = Counter(look_of.values())
        pages = [Page([], read[number] >= look.count) for number, look in enumerate(looks)]
        for row in await judged(store, worker, found):
            pages[look_of[row.id]].rows.append(row)
        return pages

    return await past_strangers(store, due, read)


def _first_of(number: int, look: Look, which: Document) -> list[Document]:
    place: dict[str, Any] = {"queue": look.queue, "name": {"$in": sorted(look.names)}}
    if look.group is None:
        place |= {"status": "INIT", "pinned": False}
    else:
        # Not `pinned: False`: for that the server would take the index of all that waits, where other groups are in front.
        place |= {"group": {"$eq": look.group}, "task_option.specific_worker_ids.0": {"$exists": False}}
    return [
        # What is due there, for anybody, in these lanes.
        {"$match": {"$and": [which, place | ({} if look.lanes is None else {"lane": {"$in": list(look.lanes)}})]}},
        # In the order of claiming.
        {"$sort": dict(IN_ORDER)},
        # No more than is wanted.
        {"$limit": look.count},
        # What a scan reads, and for whom.
        {"$project": KEY_FIELDS | {"look": {"$literal": number}}},
    ]
