"""The commands that are recorded, and the interrupted runs that are continued.

Each case runs in a folder of its own beside the tiny models, a text, samples and documents.
"""

import rope_patch

LLAMA, TEXT = "../tiny-llama", "../start-of-emma.txt"
ENGINES = ("transformers", "transformers4", "vllm", "sglang", "llama.cpp", "mlx", "mlx-vlm")
ENGINES = (*ENGINES, "axolotl", "llama-factory")
HELP = "methods diagnose eval compare report tasks recommend search extend finetune recipes patch"
HELP += " export serve verify bench picture lab env"
PICTURES = "dogs four-terms decay buckets bias clock wavelengths rotation angles grid table waves"
PICTURES += " digits bases difference walk stretch"
EVAL = f"eval {LLAMA} --method none,yarn --factor 2 --lengths 352 --depths 20,80 --samples 4"
EVAL += " --tasks rp_nonliteral,rp_json_kv_ll,perplexity,rp_short_cloze --window 32"
EVAL += f" --short-samples 2 --text {TEXT} --control-context 128"
COMPARE = f"compare {LLAMA} --method yarn,self-extend --factor 2 --lengths 352 --samples 2"
COMPARE += f" --profile quick --tasks rp_niah_single_2_ll,perplexity,rp_short_grammar --text {TEXT}"
SEARCH = f"search {LLAMA} --length 512 --strategy yarn-rcd --fitness recall --count 2 --held-out 2"
SEARCH += " --evaluations 3"
RECOMMEND = f"recommend {LLAMA} --length 512 --minutes 60 --no-search --samples ../samples.jsonl"
EXTEND = f"extend {LLAMA} --to 4x --budget 3h --samples 12 --no-search"
TRAIN = f"finetune --model {LLAMA} --method yarn --factor 2 --train_length 256"
TRAIN += " --data ../documents.jsonl --max_steps 4 --learning_rate 1e-3 --save_steps 2"
TRAIN += " --ignore_plan true --use_cpu true --bf16 false --output_dir out"
LORA = f"{TRAIN} --lora_rank 1 --lora_targets q_proj"
LAB = "lab --encodings none,learned,rope --length 32 --test 32,64 --steps text=4,recall=1"
LAB += " --processes 1 --out out"

CASES = {
    "eval": [f"{EVAL} --out out", f"{EVAL} --out out --json", "report out --out again"],
    "compare": [f"{COMPARE} --out out", "report out --json", f"{EVAL} --engine vllm"],
    "recommend": [f"{RECOMMEND} --out out", f"{RECOMMEND} --out out --json"],
    "search": [
        f"{SEARCH} --out out --picture live.svg",
        f"{SEARCH} --out out --json",
        *(f"export {LLAMA} --engine {engine} --found out" for engine in ENGINES),
        f"export {LLAMA} --engine llama.cpp --found out --write converted",
    ],
    "finetune": [f"{LORA} --resume auto", f"{LORA} --resume auto --seed 7"],
    "finetune-plans": [
        "finetune --keys",
        "finetune --config yarn_64k --plan",
        f"{LORA} --plan --json",
        f"{TRAIN} --inspect-data --duplicates --picture lengths.svg",
        f"{TRAIN} --inspect-data --json",
    ],
    "lab": [LAB, f"{LAB} --json"],
    "bench": [
        f"bench {LLAMA} --method yarn,dynamic-yarn --prompt 300 --decode 2 --repeats 1 --json"
    ],
    "pictures": ["picture", "picture --json"]
    + [f"picture {name} --out {name}.svg" for name in PICTURES.split()]
    + [f"picture angles --model {LLAMA} --method ntk --factor 8 --out own.svg --json"],
    "methods": [f"methods {name} --json" for name in ("", *rope_patch.list_methods())]
    + ["methods", "methods yarn", "methods longrope", "methods slow-half --plugin ../my_method.py"],
    "help": ["--help", *(f"{name} --help" for name in HELP.split())],
    "lists": ["tasks", "recipes", "recipes yarn_64k", "recipes fsdp2"],
    "diagnose": [
        f"diagnose {LLAMA} --length 512 --picture a.svg",
        f"diagnose {LLAMA} --method yarn --factor 4 --option beta_fast=16",
        "diagnose ../tiny-gemma3 --length 1024 --json",
        "diagnose ../tiny-qwen3",
    ],
    "patch": [
        f"patch {LLAMA} --method yarn --factor 4 --to yarn",
        f"patch {LLAMA} --method dynamic-yarn --length 2048 --to dynamic --weights copy --json",
        f"patch {LLAMA} --method self-extend --option window=64 --to map",
        "diagnose yarn",
        "export yarn --engine vllm",
        f"verify yarn --against {LLAMA} --method yarn --factor 4",
        f"verify {LLAMA} --against {LLAMA} --method yarn --factor 4 --json",
        f"patch {LLAMA} --method slow-half --factor 4 --to own --plugin ../my_method.py",
    ],
    "export": [
        f"export {model} --engine {engine} --method {method} --factor 4 {json_word}".strip()
        for engine in ENGINES
        for model, method, json_word in (
            (LLAMA, "yarn", ""),
            ("../tiny-gemma3", "ntk", "--json"),
            ("../tiny-qwen3", "dynamic-yarn", ""),
        )
    ],
    "env": ["env", "env --json", "env --check ../tiny-qwen3"],
    "refused": [
        "--version",
        "evaluate",
        "methods yarm",
        "diagnose nowhere",
        f"diagnose {LLAMA} --method yarn --factor 4 --option beta=1",
        f"patch {LLAMA} --method yarn --to new",
        f"patch {LLAMA} --method yarn --factor 4 --to ../tiny-llama",
        f"export {LLAMA} --engine ollama --method yarn --factor 4",
        f"eval {LLAMA} --method yarn --lengths 352 --out out",
        f"eval {LLAMA} --method none --tasks rp_nothing --out out",
        f"search {LLAMA} --length 128 --out out",
        f"extend {LLAMA} --to 1x --out out",
        "report nowhere",
        "finetune --config nowhere",
        "recipes fsdp3",
        "picture clocks",
        "lab --encodings rotary --out out",
        f"verify nowhere --against {LLAMA}",
        f"{TRAIN} --loop",
        "bench --plan",
    ],
}

# Killed when the files of a pattern have so many lines, and then continued by the same command.
INTERRUPTED = {
    "extend": (f"{EXTEND} --out out", "out/work/recommend/state.jsonl", 4),
    "eval": (f"{EVAL} --out out", "out/cache/answers-*.jsonl", 5),
    "recommend": (f"{RECOMMEND} --out out", "out/state.jsonl", 6),
    "search": (f"{SEARCH} --out out", "out/state.jsonl", 3),
    "lab": (LAB, "out/cells.jsonl", 4),
    "finetune": (f"{LORA} --resume auto", "out/log.jsonl", 3),
}
