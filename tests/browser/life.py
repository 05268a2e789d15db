"""A day in the photo shop, so that every page has something to show: made by the real fleet, not written into the database."""

from __future__ import annotations

import signal
from datetime import timedelta

from taskmesh import TaskMesh
from taskmesh.model.task import Status
from tests.browser.site import Site
from tests.waiting import eventually
from tests.working import finished, status_is

LONG_KEY = (
    "suppliers/northern-lights-photo-paper-and-framing-gmbh/price-lists/2026/q4/"
    + "very-long-file-name-" * 6
    + "v2.xlsx"
)
MAIL = {"mia@photos.example": "shipped", "liam@photos.example": "invoice", "noah@photos.example": "shipped"}


async def a_day(site: Site, shop: TaskMesh) -> None:
    """Let the shop work for a moment."""
    doomed = site.hire("photo-3", "--concurrency", "20")
    site.open("2026-10.0", "2026-10.1", "mail")
    images = {
        f"2026/11/21/IMG_{n:04}.jpg": {"path": f"original/{n:04}.jpg", "width": 400 + n % 3 * 800}
        for n in range(240, 252)
    }
    await shop.publisher.publish_many("image.resize", images)
    mails = {f"order-{10_482 + n}": {"to": to, "template": template} for n, (to, template) in enumerate(MAIL.items())}
    await shop.publisher.publish_many("mail.send", mails)
    await shop.publish("mail.send", "order-10485", {"to": "olivia (at) photos.example", "template": "shipped"})
    await shop.publish("mail.send", "order-10486", {"to": "emma, photos.example", "template": "invoice"})
    old_films = {f"holiday-{year}": {"source": f"holiday-{year}.avi", "codec": "vp7"} for year in (2009, 2010, 2012)}
    await shop.publisher.publish_many("video.transcode", old_films)
    await shop.publish("report.monthly", "2026-10", {"month": "2026-10"})
    await shop.publish("backup.verify", "orders-2026-11-20", {"archive": "orders-2026-11-20.tar"})
    await shop.publish("image.resize", LONG_KEY, {"path": "original/0001.jpg"}, delay_ms=7_200_000, priority=5)
    await shop.publish(
        "price.import", "northern-lights-2026-q4", {"list": "q4.xlsx"}, queue="imports", group="northern-lights"
    )
    await shop.publish(
        "mail.send", "order-10331", {"to": "ava@photos.example", "template": "reminder"}, delay_ms=86_400_000
    )
    await shop.cancel("mail.send", "order-10331")
    await shop.pause(
        "imports", reason="the supplier sends a new list", by="mia", until=shop.clock.now() + timedelta(hours=6)
    )
    async with shop.flow("album-2026-11") as album:
        pages = [
            album.add(shop.definitions["image.resize"], f"album/page-{n}", path=f"original/{n:04}.jpg")
            for n in range(3)
        ]
        album.add(
            shop.definitions["mail.send"], "album-is-ready", after=pages, to="ava@photos.example", template="shipped"
        )
    await shop.set_limit("mail", rate=600, per_ms=60_000, running=20)
    await shop.set_limit("imports", group_running=1)
    await shop.queues.set_group_limit("imports", "northern-lights", 2)
    berlin = "Europe/Berlin"
    nightly, last = {"archive": "nightly.tar"}, {"month": "last"}
    await shop.every("backup.verify", cron="30 3 * * *", schedule_id="verify-backups", params=nightly, timezone=berlin)
    await shop.every("report.monthly", cron="0 6 1 * *", schedule_id="monthly-report", params=last, timezone=berlin)
    await shop.every(
        "price.import", interval_ms=900_000, schedule_id="price-lists", overlap="skip", params={"list": "all"}
    )
    await shop.schedules.pause("price-lists", reason="until the new list is there", by="mia")
    await shop.schedules.trigger("verify-backups")

    site.staffed("photo-3")
    await shop.publish(
        "video.transcode", "wedding-2026-11-14", {"source": "wedding.mov"}, specific_worker_ids=["photo-3"]
    )
    await status_is(shop, "video.transcode", "wedding-2026-11-14", Status.RUNNING, 30)
    await shop.set_option("video.transcode", "wedding-2026-11-14", specific_worker_ids=[])
    doomed.signal(signal.SIGKILL)
    site.open("wedding-2026-11-14")
    await finished(shop, "video.transcode", "wedding-2026-11-14", 40)
    for name, key in (
        ("mail.send", "order-10485"),
        ("mail.send", "order-10486"),
        *(("video.transcode", key) for key in old_films),
    ):
        await finished(shop, name, key, 40)
    await finished(shop, "backup.verify", "orders-2026-11-20", 40)
    await eventually(lambda: _done(shop), 60, what="the images are done")


async def _done(shop: TaskMesh) -> bool:
    return await shop.listing.count("name:image.resize status:INIT key:2026/11/21") == 0
