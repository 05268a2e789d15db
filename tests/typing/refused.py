"""What users get wrong: every line that ends in `# refused` must be refused by the type checker, and no other. Never run."""

from __future__ import annotations

from taskmesh import Task, TaskMesh, TaskOption, current_task

mesh = TaskMesh()


@mesh.task
async def resize(path: str, width: int = 200) -> int:
    current_task().progres(0.5)  # refused
    current_task().worker = "w"  # refused
    await current_task().progress("half")  # refused
    await current_task().publish(resize, "k", path=1)  # refused
    await current_task().publish(resize, "k", paht="a")  # refused
    await current_task().step("s", len, 5)  # refused
    await current_task().start(resize, "k", path=5)  # refused
    return width + len(path)


@mesh.task(batch=10)
async def index(items: list[bytes]) -> list[int]:
    return [len(item) for item in items]


def before(task: Task, more: int) -> None: ...


async def main() -> None:
    await resize.publish("k")  # refused
    await index.publish("k", "text")  # refused
    await index.publish("k", [b"text"])  # refused
    mesh.task(batch="10")  # refused
    mesh.task(fail_on="ValueError")  # refused
    await resize.publish("k", path=1)  # refused
    await resize.publish("k", path="a", colour="red")  # refused
    await resize.publish(1, path="a")  # refused
    text: str = await (await resize.publish("k", path="a")).result()  # refused
    text = await resize.handle("k").result()  # refused
    resize.handle(7)  # refused
    resize.configure(prioritty=1)  # refused
    resize.configure(delay_ms="1 s")  # refused
    await mesh.publish("resize", "k", {}, run_agian=True)  # refused
    await mesh.publish("resize", "k", {}, max_timeouts="5")  # refused
    await mesh.set_option("resize", "k", priority="high")  # refused
    await mesh.set_option("resize", "k", queue="other")  # refused
    TaskOption(retries=3)  # refused
    TaskOption(unexpected_retry_delay_scope="queue")  # refused
    await mesh.set_limit("q", ratte=3)  # refused
    mesh.every("resize", intervall_ms=3)  # refused
    mesh.consumer(before_=before)  # refused
    mesh.consumer(before=before)  # refused
    mesh.consumer(on_claim={"queue": "q"})  # refused
    mesh.hooks(befor=before)  # refused
    mesh.task(run="fork")(before)  # refused
    mesh.retry_all("status:FAIL")  # refused
    assert text
