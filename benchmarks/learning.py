"""Does older data cost accuracy? The quickstart under every schedule, several seeds each, and a picture of it.

    python benchmarks/learning.py [--json [FILE]] [--seeds 5] [--steps 60] [--plot docs/learning.png]
    python benchmarks/learning.py --algorithms [NAME ...] [--json [FILE]] [--seeds 5]
    python benchmarks/learning.py --only PART ... [--json [FILE]]

    accuracy_SCHEDULE         mean over seeds of the accuracy of the last 5 steps; async2: max_staleness 2
    points_vs_sync_SCHEDULE   the difference to sync, in points of a hundred
    points_interval_SCHEDULE  half the width of its 95 % interval (Welch's t over the seeds)
    staleness_SCHEDULE        mean staleness of the samples
    worst_points_vs_sync      the lowest of the differences

With `--algorithms` each algorithm (all, or those named) under sync and async2, with two updates a step
(`--mini-batches`), since with one no clip ever acts and most of them make the same update:

    accuracy_ALGORITHM_SCHEDULE       mean over seeds, as above
    accuracy_std_ALGORITHM_SCHEDULE   its deviation over seeds

With `--only` these parts, each a few minutes at most but for the first:

    points       periodic_points        quickstart-tools under periodic, and under async with max_staleness 2, against
                 async2_points          sync: accuracy of the last 5 steps, in points of a hundred. No prompt of them
                                        was trained on before: a run draws 1,920 of 6,480 products
                 ..._points_interval    half the width of the 95 % interval (Welch); there are more seeds, from
                                        `--seeds` (at least 2) to 12, until both are 2 or less
    pass_at_k    pass_at_k_max_abs      pass@k of an evaluation minus the closed form in exact fractions, n up to 64
    sft_loss     sft_loss_max_rel       loss and gradients of SFT on a float64 model (GPT-2's architecture, whose norms
                                        stay in float64), against torch's cross entropy of transformers' logits
                 sft_engine_max_rel     the same of the engine in float32 on the quickstart's model: packed and row by
                                        row, one rank and two
    eval_pause   eval_pause             rows of 30 steps that were not generated before a background evaluation ended,
                                        which outlasts the run: had one waited for it, it would count
                 eval_pause_rows        rows that were generated beside it
                 eval_pause_in_turns    the first count where evaluator, rollout and actor take turns on one device, and
                                        rows do wait: shows that the count sees it
    distill      distill_steps_x        median over seeds of the steps to an accuracy of 0.95 with a teacher's 8
                                        likeliest tokens (`algorithm.top_k`) / by GRPO; both otherwise with the
                                        quickstart's own settings, the teacher trained first by GRPO (seed 1000)
                 distill_steps_x_two    the same with two responses to a prompt, not sixteen; such runs of GRPO have
                                        `FEW_STEPS` steps
                 grpo_steps,            medians of the steps themselves; a run that never comes so far counts as one
                 distill_steps, ...two  step more than it has. The accuracy is that of the last 512 responses, which
                                        are one step's or, with two to a prompt, eight steps'
                 answers_steps          steps of the same model and optimizer to the same accuracy by cross entropy of
                                        the right answers to all prompts of the data: what the step size allows
                 teacher_accuracy       of the teacher's last 5 steps

`async_wall_x` is a figure of `python benchmarks/papers stability`.

Runs take turns: every schedule with seed 0, then with seed 1, ... so that what else the machine does hits all alike.
The picture (needs matplotlib) shows reward, response length and its deviation, over steps and over wall clock: the
mean over seeds, and from the lowest to the highest.
"""

import argparse
import math
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the clone, for `benchmarks` and its packages

from benchmarks import say_when
from benchmarks.intervals import difference_of
from benchmarks.json_option import add_json_option, report
from benchmarks.recipe_runs import RecipeRun, run_recipe, schedule_settings

SCHEDULES = {"sync": ("sync", 0), "async1": ("async", 1), "async2": ("async", 2), "async4": ("async", 4),
             "substep1": ("substep", 1), "periodic": ("periodic", 0)}  # fmt: skip
ALGORITHMS: Mapping[str, tuple[str, ...]] = {
    "grpo": (), "dr_grpo": ("scale_advantages_by_std=false", "loss_normalization=constant"), "dapo": ("name=dapo",),
    "gspo": ("name=gspo",), "cispo": ("name=cispo",), "dppo_tv": ("name=dppo",),
    "dppo_kl": ("name=dppo", "divergence=kl"), "rloo": ("name=rloo",),
    "reinforce_plus_plus": ("name=reinforce_plus_plus",),
    "reinforce_plus_plus_baseline": ("name=reinforce_plus_plus", "baseline=group"), "ppo": ("name=ppo",),
    "decoupled": ("off_policy.method=decoupled",), "icepop": ("off_policy.method=icepop",),
    "sequence_mask": ("off_policy.mask=sequence",), "geometric_mask": ("off_policy.mask=geometric",),
}  # fmt: skip
"""Rows of the table -> settings of section `algorithm`; the corrections are GRPO's."""
STEPS_AT_MOST = {"dapo": 35}
"""DAPO leaves out groups whose responses are all right: a run ends once nine of ten are."""
LAST_STEPS = 5
TARGET = 0.95
QUICKSTART_RESPONSES, FEW_RESPONSES = 16, 2
FEW_STEPS = 90
MOST_UPDATES = 200
TEACHER_SEED = 1000
LITTLE_KEPT = ("rollout.samples_per_step=0", "checkpoint.interval=0")
CURVES = {
    "reward_mean": "reward",
    "response_tokens_mean": "response length (tokens)",
    "response_tokens_std": "its deviation (tokens)",
}
Metrics = Sequence[Mapping[str, Any]]


def train(
    directory: Path,
    schedule: str,
    *,
    seed: int,
    steps: int,
    algorithm: str = "grpo",
    mini_batches: int = 1,
    teacher: Path | None = None,
    responses: int = QUICKSTART_RESPONSES,
) -> Metrics:
    """Run the quickstart under one of `SCHEDULES`, with one of `ALGORITHMS` or a teacher; return its metrics.

    Args:
        responses: to a prompt.

    Raises:
        SystemExit: the run failed; says what it printed.
    """
    settings = [
        *schedule_settings(*SCHEDULES[schedule]),
        f"seed={seed}",
        *LITTLE_KEPT,
        f"actor.num_mini_batches={mini_batches}",
        f"schedule.n_samples_per_prompt={responses}",
        *(f"algorithm.{setting}" for setting in ALGORITHMS[algorithm]),
    ]
    if teacher is not None:
        settings += ["algorithm={name: distill, top_k: 8}", f"ref.path={teacher}"]
    steps = min(steps, STEPS_AT_MOST.get(algorithm, steps))
    return run_recipe("quickstart", directory, settings, steps=steps).metrics


def figures_of(runs: Mapping[str, Sequence[Metrics]]) -> dict[str, float]:
    """Return the figures from every schedule's runs, one per seed."""
    figures: dict[str, float] = {}
    final = {name: [_final_accuracy(metrics) for metrics in of_seeds] for name, of_seeds in runs.items()}
    for name, accuracies in final.items():
        figures[f"accuracy_{name}"] = statistics.fmean(accuracies)
        figures[f"staleness_{name}"] = statistics.fmean(line["staleness_mean"] for run in runs[name] for line in run)
        if name != "sync" and "sync" in final:
            points = difference_of(accuracies, final["sync"])
            figures[f"points_vs_sync_{name}"] = 100 * points.value
            figures[f"points_interval_{name}"] = 100 * points.half_width
    differences = [value for name, value in figures.items() if name.startswith("points_vs_sync_")]
    if differences:
        figures["worst_points_vs_sync"] = min(differences)
    return figures


def table_of(runs: Mapping[tuple[str, str], Sequence[Metrics]]) -> dict[str, float]:
    """Return the figures of (algorithm, schedule) -> runs, one per seed."""
    figures: dict[str, float] = {}
    for (algorithm, schedule), of_seeds in runs.items():
        accuracies = [_final_accuracy(metrics) for metrics in of_seeds]
        figures[f"accuracy_{algorithm}_{schedule}"] = statistics.fmean(accuracies)
        figures[f"accuracy_std_{algorithm}_{schedule}"] = statistics.pstdev(accuracies)
    return figures


def distill(seeds: int, steps: int) -> dict[str, float]:
    """Train a teacher, then students of as many seeds with and without it, on many responses and on few."""
    found: dict[str, list[int]] = {name: [] for name in ("grpo", "distill", "grpo_two", "distill_two")}
    with tempfile.TemporaryDirectory(prefix="learning-") as temporary:
        directory = Path(temporary)
        taught = train(directory / "teacher", "async1", seed=TEACHER_SEED, steps=steps)
        teacher = directory / "teacher" / "checkpoints" / f"step_{steps:06d}" / "hf"
        for seed in range(seeds):
            for name, reached in found.items():
                responses = FEW_RESPONSES if name.endswith("_two") else QUICKSTART_RESPONSES
                metrics = train(
                    directory / f"{name}-{seed}", "async1", seed=seed, responses=responses,
                    steps=FEW_STEPS if name == "grpo_two" else steps,
                    teacher=teacher if name.startswith("distill") else None,
                )  # fmt: skip
                reached.append(steps_to_target(metrics, window=QUICKSTART_RESPONSES // responses))
            say_when(f"distill: seed {seed}: " + ", ".join(f"{name} {of[-1]}" for name, of in found.items()))
    ratios = {
        f"distill_steps_x{kind}": statistics.median(
            b / a for a, b in zip(found[f"grpo{kind}"], found[f"distill{kind}"], strict=True)
        )
        for kind in ("", "_two")
    }
    names = ("grpo_steps", "distill_steps", "grpo_steps_two", "distill_steps_two")
    medians = {name: statistics.median(reached) for name, reached in zip(names, found.values(), strict=True)}
    return {**ratios, **medians, "answers_steps": answers_steps(), "teacher_accuracy": _final_accuracy(taught)}


def steps_to_target(metrics: Metrics, *, window: int) -> int:
    """Return the first step whose last `window` steps, itself included, are `TARGET` right together, or one step more
    than there are."""
    accuracies = [float(line["accuracy"]) for line in metrics]
    ends = range(window, len(accuracies) + 1)
    return next(
        (end for end in ends if statistics.fmean(accuracies[end - window : end]) >= TARGET), len(accuracies) + 1
    )


def answers_steps() -> int:
    """Return after how many updates the right answers have a mean probability of `TARGET`, each update by the cross
    entropy of all of them."""
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import AutoModelForCausalLM

    from launcher.config.load_config import load_config
    from launcher.config.paths import find_recipe
    from workers.data.prompt_rows import read_data
    from workers.data.tokenizer import load_tokenizer

    config = load_config(find_recipe("quickstart"))
    tokenizer = load_tokenizer(Path(config.model.path))
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    texts = [
        [tokenizer(text)["input_ids"] for text in (str(row.prompt), row.ground_truth)]
        for row in read_data(config.data, own_rollout=False)
    ]
    whole = [[*prompt, *answer, tokenizer.eos_token_id] for prompt, answer in texts]
    tokens = torch.zeros(len(whole), max(map(len, whole)), dtype=torch.long)
    labels = torch.full_like(tokens, -100)
    for line, ((prompt, _), own) in enumerate(zip(texts, whole, strict=True)):
        tokens[line, : len(own)] = torch.tensor(own)
        labels[line, len(prompt) : len(own)] = tokens[line, len(prompt) : len(own)]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.actor.lr, betas=config.actor.betas, weight_decay=config.actor.weight_decay
    )
    for update in range(MOST_UPDATES):
        logits = model(tokens).logits[:, :-1].transpose(1, 2)
        each = cross_entropy(logits, labels[:, 1:], reduction="none")
        if float((-each.detach().sum(1)).exp().mean()) >= TARGET:
            return update
        (each.sum() / (labels >= 0).sum()).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.actor.grad_clip or math.inf)
        optimizer.step()
        optimizer.zero_grad()
    return MOST_UPDATES


def _final_accuracy(metrics: Metrics) -> float:
    return statistics.fmean(float(line["accuracy"]) for line in metrics[-LAST_STEPS:])


POINTS_OF, MOST_SEEDS, POINTS_WIDE = ("periodic", "async2"), 12, 2.0
MOST_RESPONSES = 64


def points(seeds: int, steps: int) -> dict[str, float]:
    """Run quickstart-tools under `sync` and `POINTS_OF` with more and more seeds."""
    accuracies: dict[str, list[float]] = {name: [] for name in ("sync", *POINTS_OF)}
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="learning-") as temporary:
        for seed in range(MOST_SEEDS):
            for name, found in accuracies.items():
                settings = [*schedule_settings(*SCHEDULES[name]), f"seed={seed}", *LITTLE_KEPT]
                ran = run_recipe("quickstart-tools", Path(temporary) / f"{name}-{seed}", settings, steps=steps)
                found.append(_final_accuracy(ran.metrics))
                say_when(f"points: seed {seed} {name}: accuracy {found[-1]:.4f}")
            for name in POINTS_OF:
                difference = difference_of(accuracies[name], accuracies["sync"])
                figures[f"{name}_points"] = 100 * difference.value
                figures[f"{name}_points_interval"] = 100 * difference.half_width
            widest = max(figures[f"{name}_points_interval"] for name in POINTS_OF)
            if seed + 1 >= max(2, seeds) and widest <= POINTS_WIDE:
                break
    means = {f"tools_accuracy_{name}": statistics.fmean(found) for name, found in accuracies.items()}
    return {**figures, "points_seeds": len(accuracies["sync"]), **means}


def pass_at_k(seeds: int, steps: int) -> dict[str, float]:
    """Compare every n, c and k."""
    from workers.rollout import evaluate

    worst = 0.0
    for n in range(1, MOST_RESPONSES + 1):
        for c in range(n + 1):
            for k in range(1, n + 1):
                exact = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
                worst = max(worst, abs(float(Fraction(evaluate.pass_at_k(n, c, k)) - exact)))
    return {"pass_at_k_max_abs": worst}


def eval_pause(seeds: int, steps: int) -> dict[str, float]:
    """Run the quickstart beside an evaluation that outlasts it, and in turns with a shorter one."""
    steps = min(steps, EVALUATED_STEPS)
    own = ("evaluate.temperature=1.0", "evaluate.timeout_s=1.0", *LITTLE_KEPT)
    with tempfile.TemporaryDirectory(prefix="learning-") as temporary:
        # 20 prompts: eight times what the steps draw. Every version, since some may pass while it starts.
        apart = ("evaluate.n_samples_per_prompt=6000", "evaluate.interval=1", *own)
        ran = run_recipe("quickstart", Path(temporary) / "apart", apart, steps=steps, roles=APART)
        waited, meanwhile = _rows_around_evaluation(ran)
        in_turn = (f"evaluate.interval={steps}", "schedule.mode=sync", "schedule.max_staleness=0")
        shared = ("evaluate.n_samples_per_prompt=100", *in_turn, *own)
        ran = run_recipe("quickstart", Path(temporary) / "shared", shared, steps=steps, roles=IN_TURNS)
        in_turns, _ = _rows_around_evaluation(ran)
    return {"eval_pause": waited, "eval_pause_rows": meanwhile, "eval_pause_in_turns": in_turns}


EVALUATED_STEPS = 30
APART, IN_TURNS = "rollout:1,actor:1,ref:1,evaluate:1", "rollout+actor+evaluate:1"


def _rows_around_evaluation(ran: RecipeRun) -> tuple[int, int]:
    """Return how many trained rows were generated after the first evaluation, and how many while it went on.

    A step counts as after it if an instance that generated for the step did so beyond the evaluation's end.
    """
    from launcher.timeline.run_timeline import RunTimeline
    from workers.records.ledger_file import read_ledger

    spans = RunTimeline.read(ran.directory).spans
    own = spans.get("evaluate-0-0", ())
    evaluation = next((span for span in own if span.name == "evaluate"), None)
    if evaluation is None:
        raise SystemExit(
            "eval_pause: the evaluation did not begin before the training was over; the machine is too busy"
        )
    generating = [span for name, every in spans.items() if name.startswith("rollout-") for span in every]
    ends: dict[int, float] = {}
    for span in generating:
        if span.name == "generate":
            step = int(str(span.attributes["step"]))
            ends[step] = max(ends.get(step, span.end), span.end)
    after = meanwhile = 0
    for _, line in read_ledger(ran.directory).trained:
        end = ends[line.admitted_step]
        after += len(line.indices) * (end > evaluation.end)
        meanwhile += len(line.indices) * (evaluation.start < end <= evaluation.end)
    return after, meanwhile


def sft_loss(seeds: int, steps: int) -> dict[str, float]:
    """Compare losses and gradients, on one rank and on two."""
    worst: dict[str, float] = {"sft_loss_max_rel": 0.0, "sft_engine_max_rel": 0.0}
    for ranks in (1, 2):
        with tempfile.TemporaryDirectory(prefix="learning-") as temporary:
            context = multiprocessing.get_context("spawn")
            results = context.SimpleQueue()
            group = [context.Process(target=_sft_rank, args=(rank, ranks, temporary, results)) for rank in range(ranks)]
            for process in group:
                process.start()
            for process in group:
                process.join()
            if any(process.exitcode for process in group):
                raise SystemExit(f"sft_loss: a rank of {ranks} ended with {[each.exitcode for each in group]}")
            for name, value in results.get().items():
                worst[name] = max(worst[name], value)
    return worst


def _sft_rank(rank: int, ranks: int, directory: str, results: Any) -> None:
    import torch
    import torch.distributed as dist

    store = dist.FileStore(f"{directory}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    found = _sft_differences(rank, ranks, Path(directory))
    if rank == 0:
        results.put(found)
    dist.destroy_process_group()


def _sft_differences(rank: int, ranks: int, directory: Path) -> dict[str, float]:
    """Return the largest relative difference of each figure; on every rank."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor
    from torch.nn.functional import cross_entropy
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

    from launcher.config.load_config import load_config
    from launcher.config.paths import find_recipe
    from tq.columns import PackedBatch
    from workers.algorithms.load_algorithm import load_algorithm
    from workers.engines.fsdp.sharding import FsdpEngine
    from workers.rows.packed_rows import samples_of, sequences_of, supervised_columns

    config, cpu = load_config(find_recipe("quickstart-sft-cpu")), torch.device("cpu")
    algorithm = load_algorithm(config.algorithm, config.rollout)
    chance = torch.Generator().manual_seed(0)
    rows = []
    for length in range(3, 3 + SFT_ROWS):  # the middle of each is trained, as an assistant's reply between two messages
        tokens = torch.randint(2, 12, (length,), generator=chance)
        mask = torch.tensor([int(length // 3 <= place < length - length // 4) for place in range(length)])
        rows.append((tokens, mask.to(torch.uint8)))
    number = sum(int(mask.sum()) for _, mask in rows)

    def differences(model_dir: Path, size: int, dtype: torch.dtype) -> float:
        """Train all rows, `size` at a time, each rank its share, and compare with the judge."""
        judge = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager").double()
        total = torch.zeros((), dtype=torch.float64)
        for tokens, mask in rows:
            labels = torch.where(mask.bool(), tokens, -100)[1:]
            total = total + cross_entropy(judge(tokens[None]).logits[0, :-1], labels, reduction="sum")
        (total / number).backward()  # type: ignore[no-untyped-call]
        wanted = {name: parameter.grad for name, parameter in judge.named_parameters() if parameter.grad is not None}

        engine = FsdpEngine(model_dir, actor=config.actor, temperature=1.0, device=cpu, seed=0)
        if dtype == torch.float64:
            engine._model.double()
        own = rows[rank::ranks]
        loss_sum = torch.zeros((), dtype=torch.float64)
        for start in range(0, -(-SFT_ROWS // ranks), size):
            chosen = own[start : start + size]
            if not chosen:
                engine.forward_backward(None, lambda log_probs, _: log_probs.sum())
                continue
            batch = samples_of(PackedBatch(tuple(range(len(chosen))), supervised_columns(chosen), ()))
            loss = algorithm.loss(batch, device=cpu)
            engine.forward_backward(sequences_of(batch), loss)
            loss_sum += loss.stats["loss"].double()
        if ranks > 1:
            dist.all_reduce(loss_sum)
        worst = abs(float(loss_sum / total.detach()) - 1)
        for name, parameter in engine._model.named_parameters():
            gradient = parameter.grad
            assert gradient is not None, name
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            worst = max(worst, float((whole.double() / number - wanted[name]).norm() / wanted[name].norm()))
        return worst

    sizes, model = (SFT_ROWS, 1), Path(config.model.path)
    found = {"sft_engine_max_rel": max(differences(model, size, torch.float32) for size in sizes)}
    if ranks == 1:
        torch.manual_seed(0)
        shape = GPT2Config(
            vocab_size=13,
            n_positions=32,
            n_embd=24,
            n_layer=2,
            n_head=3,
            initializer_range=0.3,
            bos_token_id=None,
            eos_token_id=1,
        )
        exact = directory / "model"
        GPT2LMHeadModel(shape).save_pretrained(exact)
        found["sft_loss_max_rel"] = max(differences(exact, size, torch.float64) for size in sizes)
    return found


SFT_ROWS = 13

PARTS: dict[str, Callable[[int, int], dict[str, float]]] = {
    each.__name__: each for each in (points, pass_at_k, sft_loss, eval_pause, distill)
}


def plot(runs: Mapping[str, Sequence[Metrics]], target: Path) -> None:
    """Draw the curves over steps (above) and over wall clock (below)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7), layout="constrained")
    axes = figure.subplots(2, len(CURVES), sharey="col")
    for color, (name, of_seeds) in enumerate(runs.items()):
        times = np.mean([[line["time_s"] for line in metrics] for metrics in of_seeds], axis=0)
        steps = [line["step"] for line in of_seeds[0]]
        for column, (key, label) in enumerate(CURVES.items()):
            values = np.array([[line[key] for line in metrics] for metrics in of_seeds])
            for row, (x, x_label) in enumerate(((steps, "step"), (times, "seconds since the command"))):
                axis = axes[row, column]
                axis.plot(x, values.mean(axis=0), color=f"C{color}", label=name, linewidth=1.4)
                axis.fill_between(x, values.min(axis=0), values.max(axis=0), color=f"C{color}", alpha=0.12, linewidth=0)
                axis.set(xlabel=x_label, ylabel=label)
                axis.grid(alpha=0.25)
    axes[0, 0].legend(frameon=False)
    num_seeds = len(next(iter(runs.values())))
    figure.suptitle(f"Quickstart, {num_seeds} seeds: mean, and from lowest to highest")
    figure.savefig(target, dpi=110)


def main() -> int:
    """Run, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=f"of: {' '.join(PARTS)}")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--schedules", nargs="*", choices=SCHEDULES, help="default: all; of algorithms sync async2")
    parser.add_argument("--algorithms", nargs="*", choices=ALGORITHMS, help="the table of these; none named: of all")
    parser.add_argument("--mini-batches", type=int, help="updates a step; default: 1, of algorithms 2")
    parser.add_argument("--plot", type=Path, help="draw the curves into this file")
    given = parser.parse_args()
    if given.seeds < 1 or given.steps < LAST_STEPS or given.schedules == []:
        parser.error(f"give a schedule, at least one seed and {LAST_STEPS} steps")
    if given.only:
        figures: dict[str, float] = {}
        for part in given.only:
            figures |= PARTS[part](given.seeds, given.steps)
        report(given.json, figures, _lines(figures))
        return 0
    is_table = given.algorithms is not None
    algorithms = given.algorithms or (list(ALGORITHMS) if is_table else ["grpo"])
    mini_batches = given.mini_batches or (2 if is_table else 1)
    schedules = given.schedules or (
        ["sync", "async2"] if is_table else [name for name in SCHEDULES if name != "periodic"]
    )
    runs: dict[tuple[str, str], list[Metrics]] = {(one, name): [] for one in algorithms for name in schedules}
    with tempfile.TemporaryDirectory(prefix="learning-") as temporary:
        for seed in range(given.seeds):
            for (algorithm, schedule), done in runs.items():
                directory = Path(temporary) / f"{algorithm}-{schedule}-{seed}"
                options = {"seed": seed, "steps": given.steps, "mini_batches": mini_batches}
                done.append(train(directory, schedule, algorithm=algorithm, **options))
                say_when(f"seed {seed} {algorithm} {schedule}: accuracy {_final_accuracy(done[-1]):.4f}")
    of_schedules = {name: runs[algorithms[0], name] for name in schedules}
    figures = table_of(runs) if is_table else figures_of(of_schedules)
    if given.plot is not None:
        plot(of_schedules, given.plot)
    report(given.json, figures, _lines(figures))
    return 0


def _lines(figures: Mapping[str, float]) -> str:
    return "\n".join(f"{name:48} {value:10.4g}" for name, value in figures.items())


if __name__ == "__main__":
    sys.exit(main())
