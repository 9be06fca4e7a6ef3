"""The steps of a day on a GPU, in order of worth, at real sizes and in little.

Real weights come first, because what they decide no CPU can show in hours; then the kernels, whole
models, training. Bounds are in seconds of an H200 with a margin; what is cut goes on in the next
run. A dry run has the same commands at sizes that a CPU manages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from rope_patch.benchmarks.gpu_day import Step
from rope_patch.utils.installation import resource_folder

_METHODS = "none,yarn,dynamic-yarn,self-extend,rerope"
_PACKAGE = ("-m", "rope_patch")
_MEASUREMENTS = ("-m", "rope_patch.benchmarks")
_KERNELS = "hf,ours,ours-frozen,liger,flash-attn,unsloth"
_TESTS = Path("tests", "gpu")
_DRY_SECONDS = 600  # the bound of each step on a slow CPU


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What differs between a real day and a dry run; words of command lines.

    Attributes:
        model: The default model.
        trained: The model's trained length; a tuned one's config has another.
        lengths: Tokens of the questions.
        factor: The methods' factor.
        questions: Options of questions on real weights.
        answers: Options of greedy answers.
        tuned: Options of the fine-tuning.
        kernels: Options of the kernel benchmark.
        self_test: Options of the self-test.
        tiles: Options of the search for tiles.
        whole: Options of the methods' speed on an 8B shape.
        compiled: Options of compiled decode steps.
        training: Options of the training step.
    """

    model: str
    trained: str
    lengths: str
    factor: str
    questions: str
    answers: str
    tuned: str
    kernels: str
    self_test: str
    tiles: str
    whole: str
    compiled: str
    training: str


REAL = Sizes(
    model="demo",
    trained="8192",
    lengths="8192,16384,32768",
    factor="4",
    questions="--tasks rp_niah_multikey_1_ll,perplexity --samples 96 --per-text 4 "
    "--haystack emma --text emma --dtype bfloat16",
    answers="--tasks rp_niah_multikey_1 --samples 48 --per-text 4 --haystack emma --dtype bfloat16",
    tuned="--config smollm2_32k_mixed --max_steps 60 --save_steps 15",
    kernels="--lengths 1,128,512,1024,2048,8192,131072 --repeats 20 --no-model-steps",
    self_test="",
    tiles="--lengths 1,16,128,512,1024,2048 --repeats 20",
    whole="--factor 8 --prompt 32768 --decode 32 --repeats 3 --dtype bfloat16",
    compiled="--prompt 32768 --decode 32 --repeats 3 --layers 8",
    training="--length 32768 --repeats 3",
)
SMALL = Sizes(
    model="tests/assets/tiny-llama",
    trained="256",
    lengths="128,512",
    factor="2",
    questions="--tasks rp_recall_ll,perplexity --samples 2 --per-text 2 --text emma",
    answers="--tasks rp_recall --samples 2 --per-text 2",
    tuned="--config smoke_cpu --max_steps 2 --save_strategy steps --save_steps 1",
    kernels="--lengths 1,2 --repeats 1 --no-model-steps",
    self_test="--shapes llama-3.2-1b",
    tiles="--lengths 2 --repeats 1 --shapes llama-3-8b --candidates 2",
    whole="--factor 8 --prompt 1024 --decode 2 --repeats 1",
    compiled="--prompt 8 --decode 3 --repeats 1 --backend eager",
    training="--length 64 --repeats 1",
)


def day_steps(
    folder: Path, sizes: Sizes, *, model: str | None = None, rivals: Path | None = None
) -> list[Step]:
    """Return the steps, in order of worth.

    Args:
        folder: Folder of the results.
        sizes: `REAL` or `SMALL`.
        model: SmolLM2's folder or GGUF file, or `demo`; the sizes' own model if None.
        rivals: Folder with the files of others' kernels, see `rope-patch bench --help`.
    """
    name = sizes.model if model is None else model
    tuned = folder / "work" / "tuned"
    is_dry = sizes is SMALL
    shapes = resource_folder("recipes/shapes")
    whole = sizes.model if is_dry else str(shapes / "llama-3.1-8b")
    small = sizes.model if is_dry else str(shapes / "llama-3.2-1b")
    interpreted = {"TRITON_INTERPRET": "1"} if is_dry else {}
    rival_words = () if rivals is None else ("--rivals", str(rivals))

    def ours(words: str, *more: str) -> tuple[str, ...]:
        return (*_PACKAGE, *words.split(), *more)

    def measure(words: str, *more: str) -> tuple[str, ...]:
        return (*_MEASUREMENTS, *words.split(), *more)

    def out(step: str, part: str = "") -> tuple[str, str]:
        return ("--out", str(folder / step / part))

    def ask(command: str, asked: str, methods: str, options: str, *to: str) -> tuple[str, ...]:
        factor = "" if methods == "none" else f"--factor {sizes.factor}"
        words = f"--method {methods} {factor} --lengths {sizes.lengths} {options}"
        return ours(command, asked, *words.split(), *to)

    def kernels(shape: str, step: str) -> tuple[str, ...]:
        words = f"bench --shapes {shape} {sizes.kernels} --contenders {_KERNELS}"
        return ours(words, *rival_words, *out(step))

    steps = [
        Step(
            name="self-test",
            about="whether the kernels are right on this card",
            seconds=60,
            commands=(ours(f"bench --self-test {sizes.self_test}"),),
            environment=interpreted,
        ),
        Step(
            name="tests",
            about="what only a GPU can test",
            seconds=90,
            commands=(
                ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", str(_TESTS)),
            ),
            missing="" if _TESTS.is_dir() else f"{_TESTS} is not in this folder",
        ),
        Step(
            name="questions",
            about=f"real weights by likelihood: {_METHODS}",
            seconds=225,
            commands=(ask("compare", name, _METHODS, sizes.questions, *out("questions")),),
        ),
        Step(
            name="tuning",
            about="mixed windows, trained for four minutes",
            seconds=230,
            commands=(
                ours(
                    f"finetune {sizes.tuned} --resume auto",
                    *("--model", name, "--output_dir", str(tuned)),
                ),
            ),
        ),
        Step(
            name="tuned-questions",
            about="the same questions after training",
            seconds=130,
            commands=(
                ask(
                    "compare",
                    str(tuned / "model"),
                    "none",
                    f"--trained-length {sizes.trained} {sizes.questions}",
                    *out("tuned-questions"),
                ),
                ours(
                    "report",
                    str(folder / "questions"),
                    *("--trained", f"tuned={folder / 'tuned-questions'}"),
                    *out("tuned-questions", "both"),
                ),
            ),
            needs=("questions", "tuning"),
        ),
        Step(
            name="answers",
            about="real weights, greedy answers: none, yarn, self-extend",
            seconds=100,
            commands=(ask("eval", name, "none,yarn,self-extend", sizes.answers, *out("answers")),),
        ),
        Step(
            name="rotation",
            about="rotation of Llama-3-8B's heads against a copy and others",
            seconds=200,
            commands=(kernels("llama-3-8b", "rotation"),),
        ),
        Step(
            name="norm-and-rotation",
            about="norm and rotation of Qwen3-8B's heads, the same",
            seconds=200,
            commands=(kernels("qwen3-8b", "norm-and-rotation"),),
        ),
        Step(
            name="tiles",
            about="tiles, warps and stages that are faster for 1 to 2,048 tokens",
            seconds=150,
            commands=(measure(f"tiles {sizes.tiles}", *out("tiles", "launch_choices.json")),),
            environment=interpreted,
        ),
        Step(
            name="whole-models",
            about="prompt, decoding and growth of an 8B shape at 32k, as ratios to plain",
            seconds=230,
            commands=(
                ours(
                    f"bench {whole} --random-weights --method {_METHODS} {sizes.whole}",
                    *out("whole-models", "speed.json"),
                ),
            ),
        ),
        Step(
            name="compiled",
            about="decode steps of eight such layers: eager, compiled, in CUDA graphs",
            seconds=200,
            commands=(
                measure(f"compiled {whole} {sizes.compiled}", *out("compiled", "compiled.json")),
            ),
        ),
        Step(
            name="training-step",
            about="a step of a 1B shape at 32k against transformers and the planned memory",
            seconds=120,
            commands=(
                measure(
                    f"training-step {small} {sizes.training}",
                    *out("training-step", "training-step.json"),
                ),
            ),
        ),
        Step(
            name="gemma-3",
            about="norm and rotation of Gemma-3-12B's heads, against others",
            seconds=200,
            commands=(kernels("gemma-3-12b", "gemma-3"),),
        ),
    ]
    return [replace(step, seconds=_DRY_SECONDS) for step in steps] if is_dry else steps
