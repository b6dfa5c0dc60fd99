"""Several processes of one training run, as torchrun would start them; forks, because imports take seconds."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback

SECONDS = 240


def _free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _work(call, place, results):
    (function, arguments), (rank, count, port) = call, place
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "GROUP_RANK": 0}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
    os.environ.update({name: str(value) for name, value in variables.items()}, GLOO_SOCKET_IFNAME="lo")
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    rank_zero_only.rank = rank  # Lightning reads it when it is imported
    try:
        results.put((rank, function(*arguments), None))
    except BaseException as error:  # noqa: BLE001 - whatever it is, the test shall see it
        traceback.print_exc()
        results.put((rank, None, f"{type(error).__name__}: {error}"))


def start_processes(function, *arguments, count=2):
    """Processes that call the function, and a queue of (rank, what it returned, what it raised)."""
    context = multiprocessing.get_context("fork")
    results, port = context.Queue(), _free_port()
    processes = [
        context.Process(target=_work, args=((function, arguments), (rank, count, port), results))
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    return processes, results


def run_processes(function, *arguments, count=2):
    """What the function returned in each process; an error of any is an error here."""
    processes, results = start_processes(function, *arguments, count=count)
    answers = [results.get(timeout=SECONDS) for _ in processes]
    found = {rank: (value, error) for rank, value, error in answers}
    for process in processes:
        process.join(SECONDS)
    errors = [error for _, error in found.values() if error]
    assert not errors, errors
    return [found[rank][0] for rank in range(count)]
