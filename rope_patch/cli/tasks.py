"""The command `tasks`."""

from __future__ import annotations

import re

from rope_patch.cli.options import argument, option
from rope_patch.cli.runtime import requires_extra


def tasks(
    name: str | None = argument(None, "Show one task or group."),
    path: bool = option(False, "Print their folder, for lm_eval --include_path.", "--path"),
) -> None:
    """List the retrieval tasks that eval and lm-eval take, or show one.

    A name may end in _ll, where the answer's likelihood is the score, or in _mc, where the
    likeliest of several answers is chosen; the list says which tasks have such forms.

    \b
    Examples:
      rope-patch tasks
      rope-patch tasks rp_niah_single_2
      lm_eval --include_path "$(rope-patch tasks --path)" --tasks rp_niah_single_2 ...
    """
    from rope_patch import tasks
    from rope_patch.training.recipe_files import summary

    if path:
        print(tasks.FOLDER)
        return
    # The first sentence of each file's comment, up to its source in brackets.
    abouts = {
        each: re.split(r" \(|(?<=\?) ", summary(file))[0]
        for each, file in tasks.own_files().items()
    }
    if name is not None:
        if name not in abouts:
            raise tasks.unknown_task(name, abouts)
        print(f"{name}  {abouts[name]}")
        return
    with requires_extra("the tasks need", "eval"):
        groups, names = tasks.groups(), tasks.names()
    rows = [each for each in names if each == tasks.question_of(each)]
    width = max(map(len, rows))
    for row in rows:
        forms = " ".join(
            end if row + end in names else "   " for end in (tasks.LIKELIHOOD, tasks.CHOICE)
        )
        print(f"{row:<{width}}  {forms}  {abouts[row]}")
    print("\nGroups:")
    for group, members in groups.items():
        print(f"{group}: {', '.join(members)}")
