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
from typing import Any

from kernelcat.catalog.digest import digest_of
from kernelcat.store.lines import shipped
from kernelcat.verify import code_record, receipts

REWRITTEN = ("source", "id")
"""Fields that later versions write in another way."""

FILES = ("tuning_db/nvidia-h200.jsonl", "tuning_db/profiles/nvidia-h200.jsonl",
         "tuning_db/receipts/nvidia-h200.jsonl")  # fmt: skip


SUBJECT = ("implementation", "entry", "language", "variant", "problem", "gpu", "protocol")
"""Fields that a newer observation has in common with the one that it replaces."""


def main() -> None:
    revision = sys.argv[1]
    lost = sum(report(revision, file) for file in FILES)
    old = [row for row in shipped() if not code_record.is_current(row)]
    stale = [f"{row.entry}/{row.language}/{row.variant}" for row in old]
    for receipt in receipts.read(receipts.shipped_folder()):
        today = digest_of(*receipt.implementation.split("/"))
        name = receipt.implementation
        if not code_record.are_equal(name, receipt.gpu, receipt.source, today):
            stale.append(f"receipt of {name}")
    for name, count in Counter(stale).items():
        print(f"stale: {name} ({count})")
    print(f"lost {lost}, stale {len(stale)}")
    sys.exit(bool(lost or stale))


def report(revision: str, file: str) -> int:
    """Print how the observations in a file changed since ``revision``; the number of lost ones."""
    then = observations(git("show", f"{revision}:{file}"))
    now = observations((code_record.shipped_folder().parents[1] / file).read_text())
    missing = Counter(map(canonical, then)) - Counter(map(canonical, now))
    gone = [json.loads(text) for text in missing.elements()]
    subjects = {subject(one) for one in now}
    lost = [one for one in gone if subject(one) not in subjects]
    print(f"{file}: {len(then)} then, {len(now)} now, {len(gone) - len(lost)} observed again, "
          f"{len(lost)} lost")  # fmt: skip
    for one in lost:
        print(f"  lost: {subject(one)}")
    return len(lost)


def observations(text: str) -> list[dict[str, Any]]:
    """What each line of results says was observed; what lines share is put into each of them."""
    shared: dict[str, Any] = {}
    found = []
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
        found.append(record)
    return found


def canonical(observation: dict[str, Any]) -> str:
    """The observation as JSON, without fields that are empty or written in another way today."""
    kept = {k: v for k, v in observation.items() if k not in REWRITTEN and v not in (None, False)}
    return json.dumps(kept, sort_keys=True)


def subject(observation: dict[str, Any]) -> str:
    """What was observed, without when and how it came out."""
    return json.dumps({k: observation[k] for k in SUBJECT if k in observation}, sort_keys=True)


def git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()
