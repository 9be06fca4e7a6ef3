"""The app of `rope-patch`: all commands, and the options that they share."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from rope_patch.cli import (
    bench,
    compare,
    diagnose,
    env,
    evaluate,
    export,
    extend,
    finetune,
    lab,
    methods,
    patch,
    picture,
    recipes,
    recommend,
    report,
    runtime,
    search,
    serve,
    tasks,
    verify,
)
from rope_patch.cli.options import for_typer, group_titles
from rope_patch.cli.runtime import CRASHED, EXIT_CODE
from rope_patch.utils.errors import Refused, printable

logger = logging.getLogger("rope_patch")

# Aliases of options by command: the alias, and the name shown in the help.
_ALIASES = {
    "eval": {"--report": "--out", "--methods": "--method"},
    "compare": {"--report": "--out", "--methods": "--method"},
    "bench": {"--methods": "--method"},
    "search": {"--folder": "--out", "--method": "--strategy", "--budget": "--evaluations"},
    "recommend": {"--folder": "--out", "--budget": "--minutes"},
    "finetune": {  # the recipe's keys for them
        "--out": "--output_dir",
        "--trust-remote-code": "--trust_remote_code",
    },
}

_VERBOSITY = {
    "-v": runtime.be_verbose,
    "--verbose": runtime.be_verbose,
    "-q": runtime.be_quiet,
    "--quiet": runtime.be_quiet,
}


_TITLES: dict[str, dict[str, str]] = {}  # by command, the titles of the options that are in groups

# Commands whose exit code 1 is a result: an error of theirs exits with another code.
WITH_VERDICTS = ("verify", "env", "bench", "eval", "compare", "report")


class Command(TyperCommand):
    """A command that takes -v, -q and other names of its options, and that Ctrl-C ends."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words after the command's name."""
        end = args.index("--") if "--" in args else len(args)
        options = [self._renamed(word) for word in args[:end]]
        for word in options:
            if word in _VERBOSITY:
                _VERBOSITY[word]()
        options = [word for word in options if word not in _VERBOSITY]
        return super().parse_args(ctx, options + args[end:])

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the usage's words; all that stand for something are in capitals."""
        words = super().collect_usage_pieces(ctx)
        return [word.replace("{", "").replace("}", "").upper() for word in words]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options, those of a group below its title."""
        titles = _TITLES.get(self.name or "", {})
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            if parameter.param_type_name == "argument":
                name, _, kind = record[0].partition(" ")
                sections["Arguments"].append((f"{name.upper()} {kind}".rstrip(), record[1]))
            else:
                title = titles.get(parameter.name or "", "Options")
                sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def _renamed(self, word: str) -> str:
        name, equals, value = word.partition("=")
        return _ALIASES.get(self.name or "", {}).get(name, name) + equals + value

    def invoke(self, ctx: Any) -> Any:
        """Run the command.

        Raises:
            ValueError: The command's own error, with options in place of the library's parameters.
        """
        try:
            return self._invoke(ctx)
        except (ValueError, TypeError, OSError) as error:
            if self.name not in WITH_VERDICTS:
                raise
            logger.debug("the error's traceback:", exc_info=True)
            print(f"error: {printable(error)}", file=sys.stderr)
            raise typer.Exit(CRASHED) from None

    def _invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
            raise typer.Exit(EXIT_CODE) from None
        except ValueError as error:
            message = self._in_options(str(error))
            if type(error) not in (ValueError, Refused) or message == str(error):
                raise
            raise ValueError(message) from error

    def _in_options(self, message: str) -> str:
        """Return an error's message with parameters of the library replaced by their options."""
        choice = re.search(r"exactly one of (\w+) and (\w+)", message)
        match = choice or re.match(r"(\w+) must ", message)
        for name in match.groups() if match else ():
            option = self._option(name)
            message = re.sub(
                rf"(?<![\w-]){name}\b(=?)",
                lambda name_match, option=option: option + (" " if name_match[1] else ""),
                message,
                count=0 if choice else 1,
            )
        return message

    def _option(self, parameter: str) -> str:
        """Return the option that gives a parameter of the library, or the name if none does."""
        option = self._renamed("--" + parameter.replace("_", "-"))
        return option if any(option in each.opts for each in self.params) else parameter


app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # examples stay on lines of their own, and logs stay readable
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(on: bool) -> None:
    if on:
        from rope_patch.utils.installation import own_version

        print(f"rope-patch {own_version()}")
        raise typer.Exit


@app.callback()
def rope_patch(
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose",
            "-v",
            help="Show messages for debugging, too; also after the command.",
            callback=runtime.be_verbose,
        ),
    ] = False,
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet",
            "-q",
            help="Show results and errors only; also after the command.",
            callback=runtime.be_quiet,
        ),
    ] = False,
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Take a pretrained RoPE decoder to a longer context, and prove what that gained and cost."""


def _add(
    command: Callable[..., None],
    name: str | None = None,
    *,
    plugins: bool = False,
    loads_model: bool = False,
    takes_any: bool = False,
) -> None:
    """Add a command to the app; see `for_typer` for `plugins` and `loads_model`."""
    # With `takes_any`, options are passed on: keys of recipes, and those of transformers' server.
    _TITLES[name or command.__name__] = group_titles(command)
    settings = {"allow_extra_args": True, "ignore_unknown_options": True} if takes_any else None
    app.command(name, cls=Command, context_settings=settings)(
        for_typer(command, plugins, loads_model)
    )


# In the order of the help.
_add(methods.methods, plugins=True)
_add(diagnose.diagnose, plugins=True, loads_model=True)
_add(evaluate.evaluate, "eval", plugins=True)
_add(compare.compare, plugins=True)
_add(report.report)
_add(tasks.tasks)
_add(recommend.recommend, plugins=True)
_add(search.search)
_add(extend.extend, plugins=True)
_add(finetune.finetune, takes_any=True)
_add(recipes.recipes)
_add(patch.patch, plugins=True, loads_model=True)
_add(export.export, plugins=True, loads_model=True)
_add(serve.serve, takes_any=True)
_add(verify.verify, plugins=True)
_add(bench.bench, plugins=True, loads_model=True)
_add(picture.picture, plugins=True, loads_model=True)
_add(lab.lab)
_add(env.env, loads_model=True)
