"""The demo around train_gpt.py: kill the training twice, and show that it does not matter.

1. Train once, undisturbed.
2. Train again from the same seed, in another folder. SIGKILL every process of the job at a random moment,
   start the same command again, and SIGKILL it once more, this time in the middle of a save.
3. Compare every loss of the two runs, bit for bit, and exit with 1 if one differs.

It writes the loss curve to demo/loss.png, and leaves nothing else behind.
"""

import argparse
import os
import random
import shutil
import signal
import statistics
import sys
import time
from pathlib import Path

import matplotlib
from rich.table import Table
from watched_run import DemoFailed, Run, console, equal_losses


def demo(work: Path, steps: int, save_every: int, seed: int, out: Path) -> bool:
    calm = Run(work / "undisturbed", steps, save_every, seed)
    killed = Run(work / "killed", steps, save_every, seed)
    try:
        with console.status("starting") as status:
            begun = time.time()
            calm.start()
            calm.until(steps + 1, status)
            console.print(f"undisturbed: {steps} steps in {time.time() - begun:.0f} s")
            usual_s = statistics.median(save["complete"] for save in calm.saves())

            killed.start()
            if killed.until(random.randint(int(0.25 * steps), int(0.45 * steps)), status):
                time.sleep(random.uniform(0, 1) * calm.step_seconds())
                killed.kill()
            killed.start()
            if killed.until(random.randint(int(0.6 * steps), int(0.75 * steps)), status):
                killed.until_inside_a_save(usual_s, last_step=steps - 2)
                killed.kill()
            killed.start()
            killed.until(steps + 1, status)
    finally:
        calm.sweep()
        killed.sweep()

    equal, of = equal_losses(calm, killed)
    same = equal == of
    report(calm, killed, f"{equal} of {of} bit-identical")
    draw(calm, killed, same, out)
    if len(killed.kills) < 2:
        raise DemoFailed("the run was over before it could be killed twice")
    return same


def report(calm: Run, killed: Run, verdict: str) -> None:
    kills = Table(title="Two kills", title_justify="left")
    for heading in ("", *(f"kill {number + 1}" for number in range(len(killed.kills)))):
        kills.add_column(heading)
    resumed = [killed.recovery(number) for number in range(len(killed.kills))]
    pairs = list(zip(killed.kills, resumed, strict=True))
    kills.add_row("last step done", *(str(kill["step"]) for kill in killed.kills))
    kills.add_row("cut off a save", *(cut_off(kill) for kill in killed.kills))
    kills.add_row("resumed from", *(f"step {again['step']} ({again['tiers'][0]})" for again in resumed))
    kills.add_row("steps lost", *(str(kill["step"] - again["step"]) for kill, again in pairs))
    kills.add_row("state back in", *(f"{again['seconds']:.2f} s" for again in resumed))
    # With the start of torchrun and Python; the line above is Flashpoint alone.
    kills.add_row(
        "next step done after", *(f"{again['training'] - kill['at']:.1f} s" for kill, again in pairs)
    )

    saves = calm.saves() + killed.saves()
    median = {name: statistics.median(save[name] for save in saves) for name in ("blocking", "complete")}
    rate = statistics.median(save["bytes"] / save["blocking"] for save in saves) / 2**30
    whole = Table(title="Both runs", title_justify="left", show_header=False)
    whole.add_row("training", f"{calm.steps} steps of {calm.step_seconds():.2f} s, {calm.ranks} ranks, twice")
    whole.add_row(
        "saves", f"{len(saves)} of {saves[0]['bytes'] / 1e6:.0f} MB, one every {calm.save_every} steps"
    )
    whole.add_row(
        "a save blocks for",
        f"{1e3 * median['blocking']:.0f} ms (the first: {1e3 * saves[0]['blocking']:.0f} ms)",
    )
    whole.add_row("while it blocks", f"{rate:.1f} GiB/s")
    whole.add_row("complete after", f"{1e3 * median['complete']:.0f} ms, while training goes on")
    whole.add_row("losses", verdict)
    console.print(kills, whole)


def cut_off(kill: dict) -> str:
    cuts = [f"step {step}, rank {', '.join(map(str, sorted(r)))}" for step, r in kill["unfinished"].items()]
    return f"yes: {'; '.join(cuts)}" if cuts else "no"


def draw(calm: Run, killed: Run, same: bool, out: Path) -> None:
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    def curve(losses: dict[tuple[int, int], str]) -> list[float]:
        values = {key: float.fromhex(loss) for key, loss in losses.items()}
        return [
            statistics.fmean(values[rank, step] for rank in range(calm.ranks))
            for step in range(1, calm.steps + 1)
        ]

    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(figsize=(9, 4.8), facecolor="white", layout="constrained")
    x = range(1, calm.steps + 1)
    axes.plot(x, curve(calm.losses()), color="#9ecae9", linewidth=6, label="undisturbed")
    axes.plot(x, curve(killed.losses()), color="#1b4f8a", linewidth=1.6, label="killed twice")
    top = axes.get_ylim()[1]
    for number, kill in enumerate(killed.kills):
        resumed = killed.recovery(number)["step"]
        axes.axvspan(resumed, kill["step"], color="#d1495b", alpha=0.15, linewidth=0)
        axes.axvline(kill["step"], color="#d1495b", linewidth=1.4, linestyle=(0, (4, 2)))
        saving = f"\nin the save of step {max(kill['unfinished'])}" if kill["unfinished"] else ""
        left = kill["step"] > 0.8 * calm.steps  # no room to the right of it
        axes.annotate(
            f"SIGKILL after step {kill['step']}{saving}\nresumed from step {resumed}",
            (resumed if left else kill["step"], top),
            xytext=(-6 if left else 6, 0),
            textcoords="offset points",
            va="top",
            ha="right" if left else "left",
            color="#a4313f",
            fontsize=10,
        )
    axes.set(xlabel="step", ylabel="loss (mean of both ranks)", xlim=(0, calm.steps + 1))
    axes.grid(axis="y", color="#e6e6e6")
    axes.set_axisbelow(True)
    axes.legend(loc="lower left", frameon=False)
    verdict = "every loss bit-identical" if same else "the losses differ"
    axes.set_title(f"Two SIGKILLs, one loss curve: {verdict}", loc="left", fontweight="bold")
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "loss.png", dpi=150)
    console.print(f"loss curve: {out / 'loss.png'}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1, help="of the training; the kills are random each time")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="where loss.png goes")
    args = parser.parse_args()

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # clean up on a polite kill, too
    work = Path(f"/dev/shm/flashpoint-demo-{os.getpid()}")
    work.mkdir()
    begun = time.time()
    try:
        same = demo(work, args.steps, args.save_every, args.seed, args.out)
    except KeyboardInterrupt:
        return 130
    except DemoFailed as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        return 1
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if not same:
        console.print("the losses of the two runs differ", style="bold red")
        return 1
    console.print(
        f"[bold green]every loss is bit-identical[/bold green] ({time.time() - begun:.0f} s in all)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
