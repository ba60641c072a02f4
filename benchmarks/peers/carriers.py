"""Carriers of others: python carriers.py vllm|ray|iceoryx2 WORKERS, with a python that has them.

Each brings the plain values of a step to every worker and an answer back from each, as its users do: vLLM's executor
with its MessageQueue (a broadcast queue, one queue back per worker, pickled), Ray with actor calls, iceoryx2 with
publish and subscribe, an event for waking, and our msgpack.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import sys
import tempfile
from array import array
from collections.abc import Callable
from typing import Any

from round_trips import result, serve, step

LIMIT = 60.0


def vllm_worker(handle: Any, rank: int, pipe: Any) -> None:
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    commands, answers = MessageQueue.create_from_handle(handle, rank), MessageQueue(1, 1)
    pipe.send(answers.export_handle())
    commands.wait_until_ready()
    answers.wait_until_ready()
    answer = result()
    while commands.dequeue(indefinite=True) is not None:
        answers.enqueue(answer)


def vllm(workers: int) -> tuple[Callable[[], None], Callable[[], None]]:
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    spawn, commands = multiprocessing.get_context("spawn"), MessageQueue(workers, workers)
    processes, pipes = [], []
    for rank in range(workers):
        own, theirs = spawn.Pipe()
        processes.append(spawn.Process(target=vllm_worker, args=(commands.export_handle(), rank, theirs)))
        processes[-1].start()
        pipes.append(own)
    answers = [MessageQueue.create_from_handle(pipe.recv(), 0) for pipe in pipes]
    commands.wait_until_ready()
    for queue in answers:
        queue.wait_until_ready()
    plan = step()

    def trip() -> None:
        commands.enqueue(("execute_model", (plan,), {}, None))
        for queue in answers:
            queue.dequeue(timeout=LIMIT)

    def close() -> None:
        commands.enqueue(None)
        for process in processes:
            process.join(5)
            process.kill()

    return trip, close


def ray(workers: int) -> tuple[Callable[[], None], Callable[[], None]]:
    import ray

    ray.init(address="local", num_cpus=workers + 1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")

    @ray.remote(num_cpus=0)
    class Worker:
        def __init__(self) -> None:
            self.answer = result()

        def execute(self, plan: Any) -> Any:
            return self.answer

    actors, plan = [Worker.remote() for _ in range(workers)], step()

    def trip() -> None:
        ray.get([actor.execute.remote(plan) for actor in actors], timeout=LIMIT)

    return trip, ray.shutdown


class Iceoryx2:
    """One direction: bytes by publish and subscribe, and an event for each reader to sleep on."""

    def __init__(self, node: Any, name: str) -> None:
        import iceoryx2

        self.lib = iceoryx2
        kind = iceoryx2.Slice[ctypes.c_uint8]
        self.data = (
            node.service_builder(iceoryx2.ServiceName.new(name)).publish_subscribe(kind).max_subscribers(8)
            .max_publishers(8).open_or_create()
        )  # fmt: skip
        self.event = node.service_builder(iceoryx2.ServiceName.new(name)).event().open_or_create()

    def writer(self) -> Callable[[bytes], None]:
        publisher = self.data.publisher_builder().initial_max_slice_len(1 << 16).create()
        notifier = self.event.notifier_builder().create()

        def write(data: bytes) -> None:
            sample = publisher.loan_slice_uninit(len(data))
            ctypes.memmove(sample.payload_ptr, data, len(data))
            sample.assume_init().send()
            notifier.notify()

        return write

    def reader(self) -> Callable[[], bytes]:
        subscriber = self.data.subscriber_builder().create()
        listener = self.event.listener_builder().create()
        limit = self.lib.Duration.from_secs(int(LIMIT))

        def read() -> bytes:
            while (sample := subscriber.receive()) is None:
                listener.timed_wait(limit)
            payload = sample.payload()
            data = ctypes.string_at(sample.payload_ptr, payload.len())
            sample.delete()
            return data

        return read


def iceoryx2_ends(folder: str, workers: int) -> tuple[Any, list[Iceoryx2]]:
    import iceoryx2

    iceoryx2.set_log_level(iceoryx2.LogLevel.Error)
    node = iceoryx2.NodeBuilder.new().create(iceoryx2.ServiceType.Ipc)
    return node, [Iceoryx2(node, f"{folder}/{name}") for name in ["out", *(f"back{r}" for r in range(workers))]]


def iceoryx2_worker(folder: str, workers: int, rank: int, pipe: Any) -> None:
    import msgspec

    from planaria.executor.link.codec import answer, decode_command
    from planaria.protocol import StepResult

    _node, (out, *back) = iceoryx2_ends(folder, workers)
    read, write = out.reader(), back[rank].writer()
    reply = msgspec.convert(["step_result", *result()], StepResult)
    pipe.send("ready")
    while (data := read()) != b"end":
        decode_command(data)
        write(answer(0, reply))


def iceoryx2(workers: int) -> tuple[Callable[[], None], Callable[[], None]]:
    import msgspec

    from planaria.executor.link.codec import encode_command, read_reply
    from planaria.protocol import StepPlan

    spawn, folder = multiprocessing.get_context("spawn"), os.path.basename(tempfile.mktemp(prefix="planaria-"))
    _node, (out, *back) = iceoryx2_ends(folder, workers)
    write, readers = out.writer(), [one.reader() for one in back]
    processes, pipes = [], []
    for rank in range(workers):
        own, theirs = spawn.Pipe()
        processes.append(spawn.Process(target=iceoryx2_worker, args=(folder, workers, rank, theirs)))
        processes[-1].start()
        pipes.append(own)
    for pipe in pipes:
        pipe.recv()
    plan = msgspec.convert(["step", *step()], StepPlan, dec_hook=lambda kind, value: array("i", value))

    def trip() -> None:
        write(encode_command(plan))
        for read in readers:
            read_reply(read())

    def close() -> None:
        write(b"end")
        for process in processes:
            process.join(5)
            process.kill()

    return trip, close


if __name__ == "__main__":
    make = {"vllm": vllm, "ray": ray, "iceoryx2": iceoryx2}[sys.argv[1]]
    trip, close = make(int(sys.argv[2]))
    serve(trip)
    close()
    if sys.argv[1] != "iceoryx2":  # which removes its files as its objects go
        os._exit(0)
