"""The command `search`."""

from __future__ import annotations

from pathlib import Path

from rope_patch.cli import options
from rope_patch.cli.options import option
from rope_patch.cli.runtime import command_line, show_result, study


def search(
    *,
    model: options.Model,
    length: options.Length = None,
    factor: options.Factor = None,
    strategy: str = option(
        "curve",
        "How to search: curve (few numbers, Bayesian optimisation), longrope2 or longrope "
        "(evolution, a number for each pair), yarn-rcd or ntk-rcd (about ten critical dimensions).",
    ),
    evaluations: int = option(200, "Candidates to measure, at most."),
    minutes: float | None = option(
        None, "Minutes for measuring, the comparison in the end included; no limit if left out."
    ),
    fitness: str | None = option(
        None,
        "What is to be small: the loss of answers to `needles`, of `documents`, `both`, or of "
        "`recall`, word pairs for models of a short context. needles if left out, or recall where "
        "they do not fit into the trained length.",
    ),
    text: list[str] | None = option(
        None,
        "What samples are made of: a novel's name or a file; several. All novels that come with "
        "the package if left out.",
    ),
    count: int | None = option(None, "Samples that each candidate is measured on."),
    held_out: str | None = option(
        None,
        "Other samples, for the final numbers: how many, or with --samples a file of them. Twice "
        "--count if left out.",
        metavar="NUMBER|FILE",
    ),
    samples: Path | None = option(
        None,
        "Samples of your own instead: JSON lines with input_ids and labels (-100 where nothing is "
        "scored), longer than the trained length.",
    ),
    short: Path | None = option(
        None,
        "With --samples: others within the trained length, on which the model must show that it "
        "can do the task at all.",
    ),
    out: options.StateFolder = Path("out/search"),
    picture: Path | None = option(
        None, "An .svg or .png file that is drawn again while the search runs."
    ),
    layers: options.LayerOptions,
    strategy_option: list[str] | None = option(
        None,
        "An option of the way to search: for longrope start_tokens=false, so that any engine can "
        "be told what is found.",
        "--option",
        metavar="KEY=VALUE",
    ),
    loading: options.LoadingOptions,
    seed: options.Seed = 42,
    plan: options.Plan = False,
    as_json: options.Json = False,
) -> None:
    """Search the best frequencies for one checkpoint at a length.

    Candidates are measured on the model, without loading it again, by how well it answers questions
    about text of the target length. YaRN is measured first, so nothing worse is chosen. What was
    found is then compared with YaRN, NTK and PI on other samples. Writes found.json, a config.json
    with the result, what vLLM, llama.cpp and other engines are to be given, and a picture. The same
    command continues a search that was stopped; with more --evaluations one that has ended (but for
    longrope and longrope2, which plan by them). On several GPUs: accelerate launch --no_python
    rope-patch search ...

    \b
    Examples:
      rope-patch search demo --length 16384
      rope-patch search ./my-model --length 32768 --strategy yarn-rcd --evaluations 12
      rope-patch search ./my-model --factor 4 --text book.txt --fitness both --out out/book
    """
    from rope_patch.utils.figures import require_plot_path

    if picture is not None:
        require_plot_path(picture)
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file: expected a folder, made if it is missing")
    with study("searching needs", "search"):
        from rope_patch.searching import search
        from rope_patch.searching.sample_sets import DEFAULT_COUNT

        result = search(
            model,
            length=length,
            factor=factor,
            method=strategy,
            budget=evaluations,
            minutes=minutes,
            plan=plan,
            fitness=fitness,
            text=text or None,
            samples=samples,
            held_out=_parse_held_out(held_out),
            short=short,
            count=DEFAULT_COUNT if count is None else count,
            seed=seed,
            folder=out,
            picture=picture,
            command=command_line(),
            **layers.arguments(),
            **loading.arguments(),
            **options.parse_options(strategy_option),
        )
    show_result(result, as_json, None if plan else out / "found.json")


def _parse_held_out(value: str | None) -> int | str | None:
    """Return a number of samples, or the path of a file of them."""
    if value is None or not value.lstrip("+-").isdigit():
        return value
    return int(value)
