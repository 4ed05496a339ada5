"""Transfers a dataset and ends itself by SIGKILL at the k-th call that changes something; run by test_transfer.py.

    python kill_transfer.py K SOURCE DESTINATION

Calls that change something are those of os (killer.py) and the requests to S3. Prints "done" where it is through
before the k-th.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import s3fs
from killer import Killer

from eyas.shards.remote import open_store
from eyas.shards.transfer import transfer


def main() -> None:
    k, source, destination = int(sys.argv[1]), *map(open_store, sys.argv[2:])
    killer = Killer(k, False, lambda line: print(line, flush=True))
    real = s3fs.S3FileSystem._call_s3

    async def counted(self: Any, method: str, *args: Any, **options: Any) -> Any:
        if method in ("get_object", "head_object", "list_objects_v2"):
            return await real(self, method, *args, **options)
        killer.left -= 1
        last = not killer.left  # others are under way
        result = await real(self, method, *args, **options)
        if last:
            print(f"killed {method}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    s3fs.S3FileSystem._call_s3 = counted
    for _ in transfer(source, destination, workers=2, verify=False, should_stop=lambda: False):
        pass
    print("done")


if __name__ == "__main__":
    main()
