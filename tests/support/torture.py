"""Attacks the product with hostile inputs until time is up.

python tests/support/torture.py [--minutes M] [--seed N] [--attack NAME ...] [--device cuda] [--sanitize]

The inputs are those of the tests (tests/support/hostile.py), with other seeds. A find is an input that is not dealt
with rightly: an unexpected error, a crash, or a hang. Each is printed with the seed that repeats it, and the attack
goes on behind it. The exit status is 1 if there was one.
"""

import argparse
import faulthandler
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from run_sanitized import environment as sanitized

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # the product beside these tests, whatever is installed
BATCH_MINUTES = 1 / 3
"""How long a process attacks before a new one goes on, so that progress is told and memory is given back."""
HANG_SECONDS = 300


def options() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        prog="torture.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0, metavar="M", help="default: %(default)s")
    parser.add_argument("--seed", type=int, metavar="N", help="the first one; by default the time")
    parser.add_argument("--attack", action="append", metavar="NAME", help="only this one; may be repeated")
    parser.add_argument("--device", default="cpu", help="of plans, ops, checkpoints and requests; default: %(default)s")
    parser.add_argument("--sanitize", action="store_true", help="with AddressSanitizer and UBSan (builds that first)")
    parser.add_argument("--once", action="store_true", help="only the first seed: repeats what was found")
    parser.add_argument("--batch", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.seed = int(time.time()) if given.seed is None else given.seed
    return parser, given


def batch(given: argparse.Namespace) -> None:
    """In a process of its own: attacks from a seed on. The file names the input that is being tried."""
    import hostile

    (attack,), end, seed = given.attack, time.monotonic() + 60 * given.minutes, given.seed
    while time.monotonic() < end and (seed == given.seed or not given.once):
        given.batch.write_text(str(seed))
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        hostile.run(attack, [seed], given.device)
        seed += 1
    given.batch.write_text(str(seed))


def main() -> int:
    parser, given = options()
    if given.batch:
        batch(given)
        return 0
    import hostile

    if unknown := set(given.attack or ()) - set(hostile.ATTACKS):
        parser.error(f"--attack must be one of {', '.join(hostile.ATTACKS)}; got {', '.join(sorted(unknown))}")
    environment = sanitized() if given.sanitize else dict(os.environ)
    folders = [str(ROOT), str(ROOT / "tests" / "support"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    attacks = given.attack or list(hostile.ATTACKS)
    seeds = dict.fromkeys(attacks, given.seed)
    end, finds = time.monotonic() + 60 * given.minutes, []
    minutes = min(BATCH_MINUTES, given.minutes / len(attacks))
    print(f"attacks {', '.join(attacks)} from seed {given.seed} on, for {given.minutes:g} minutes", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder) / "seed"
        while True:
            for attack in attacks:
                if time.monotonic() > end and not given.once:
                    return told(finds)
                at.write_text(str(seeds[attack]))
                words = ["--attack", attack, "--device", given.device, "--batch", str(at), "--seed", str(seeds[attack])]
                words += ["--minutes", str(minutes)]
                command = [sys.executable, __file__, *words, *(["--once"] if given.once else [])]
                done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
                seed = int(at.read_text())
                if done.returncode:
                    again = f"--attack {attack} --seed {seed} --once" + " --sanitize" * given.sanitize
                    finds.append(f"FOUND by {attack} with seed {seed} (status {done.returncode}): torture.py {again}")
                    print(done.stdout[-4000:] + done.stderr[-8000:] + finds[-1], flush=True)
                    seed += 1
                else:
                    print(f"{attack}: seeds {seeds[attack]} to {seed - 1}, nothing found", flush=True)
                seeds[attack] = seed
            if given.once:
                return told(finds)


def told(finds: list[str]) -> int:
    """The exit status, after all finds once more."""
    print(f"{len(finds)} found", *finds, sep="\n", flush=True)
    return 1 if finds else 0


if __name__ == "__main__":
    sys.exit(main())
