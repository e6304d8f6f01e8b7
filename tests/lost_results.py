"""Says which receipts, measurements and profiles of an earlier revision are lost or stale today.

    python tests/lost_results.py REVISION

A receipt, a measurement or a profile counts as the same when all that was observed is equal: only
the digest of the source, and the mark of a winner, may be written in another way. A stale one is of
code that does not run today, by its digest and by the record of machine code.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

from kernelcat import catalog
from kernelcat.catalog.digest import digest_of
from kernelcat.store.lines import shipped
from kernelcat.verify import code_record, receipts

REWRITTEN = ("source", "id")
"""Fields that later versions write in another way."""

FILES = ("tuning_db/nvidia-h200.jsonl", "tuning_db/profiles/nvidia-h200.jsonl",
         "tuning_db/receipts/nvidia-h200.jsonl")  # fmt: skip


def main() -> None:
    revision = sys.argv[1]
    lost = 0
    for file in FILES:
        then = Counter(observed(git("show", f"{revision}:{file}")))
        now = Counter(observed((code_record.shipped_folder().parents[1] / file).read_text()))
        missing = then - now
        lost += missing.total()
        print(f"{file}: {then.total()} then, {now.total()} now, {missing.total()} lost")
        for text in missing:
            print(f"  lost: {text[:300]}")
    stale = [
        f"{r.entry}/{r.language}/{r.variant}" for r in shipped() if not code_record.is_current(r)
    ]
    for receipt in receipts.read(receipts.shipped_folder()):
        today = digest_of(*receipt.implementation.split("/"))
        name = receipt.implementation
        if not code_record.are_equal(name, receipt.gpu, receipt.source, today):
            stale.append(f"receipt of {name}")
    for name, count in Counter(stale).items():
        print(f"stale: {name} ({count})")
    owed = [i.name for n in catalog.complete() for i in catalog.implementations(n)]
    print(f"{len(owed)} implementations; lost {lost}, stale {len(stale)}")
    sys.exit(bool(lost or stale))


def observed(text: str) -> Iterator[str]:
    """What each line of results says was observed, as JSON; what lines share is put into each."""
    shared: dict[str, Any] = {}
    for line in text.splitlines():
        record = json.loads(line)
        if record.keys() in ({"environment", "id"}, {"id", "race"}):
            shared[record["id"]] = record.get("environment", record.get("race"))
            continue
        if "race" in record:
            record |= shared[record.pop("race")]
        if isinstance(record.get("environment"), str):
            record["environment"] = shared[record["environment"]]
        if record.get("detail") == "winner":  # before `winner` was a column
            record |= {"detail": None, "winner": True}
        record = {k: v for k, v in record.items() if v not in (None, False)}
        yield json.dumps({k: v for k, v in record.items() if k not in REWRITTEN}, sort_keys=True)


def git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()
