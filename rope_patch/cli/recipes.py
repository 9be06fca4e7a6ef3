"""The command `recipes`."""

from __future__ import annotations

from rope_patch.cli.options import argument


def recipes(
    name: str | None = argument(None, "Print this file, to be changed: NAME > my.yaml."),
) -> None:
    """List or print the recipes and launch files that come along.

    \b
    Examples:
      rope-patch recipes
      rope-patch recipes yarn_64k > my.yaml; rope-patch finetune --config my.yaml
      rope-patch recipes fsdp2 > fsdp2.yaml; accelerate launch --config_file fsdp2.yaml ...
    """
    from rope_patch.training import recipe_files

    if name is not None:
        print(recipe_files.read_file(name), end="")
        return
    groups = {
        "What to train (rope-patch finetune --config NAME):": recipe_files.recipes(),
        "Where (accelerate launch --config_file FILE):": recipe_files.launches(),
    }
    width = max(len(name) for files in groups.values() for name in files)
    for heading, files in groups.items():
        print(heading)
        for name, path in files.items():
            print(f"  {name:<{width}}  {recipe_files.summary(path)}")
