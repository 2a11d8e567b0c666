"""Find the configuration file that the user means: a path, or a recipe that ships with AsyncFlow. Torch-free."""

import difflib
from pathlib import Path

from asyncflow.errors import ConfigError
from launcher.config.paths import user_path

QUICKSTART = "quickstart"


def find_recipe(source: str | None) -> Path:
    """Return the YAML file for the command line's CONFIG.

    A file that exists wins; otherwise the last part of the path, with or without `.yaml`, may name a packaged recipe,
    so that `configs/quickstart.yaml` works from any directory. None: the packaged quickstart.

    Raises:
        ConfigError: neither a file nor a recipe; names the nearest recipe.
    """
    recipes = packaged_recipes()
    if source is None:
        if QUICKSTART not in recipes:
            raise ConfigError("CONFIG: the packaged quickstart.yaml is missing; reinstall AsyncFlow or name a file")
        return recipes[QUICKSTART]
    path = user_path(source, "CONFIG")
    if path.exists():
        return _checked(path)
    path = Path(source)
    name = path.name.removesuffix(".yaml").removesuffix(".yml")
    if name in recipes and path.parent in (Path(), Path("configs")):
        return recipes[name]
    near = difflib.get_close_matches(name, recipes, n=1)
    hint = f"did you mean {near[0]}.yaml?" if near else "give a YAML file"
    raise ConfigError(f"CONFIG: {source!r} does not exist; {hint} (packaged recipes: {' '.join(sorted(recipes))})")


def packaged_recipes() -> dict[str, Path]:
    """Return the recipes installed with AsyncFlow: name without `.yaml` -> file."""
    import configs

    return {file.stem: file for root in configs.__path__ for file in sorted(Path(root).glob("*.yaml"))}


def _checked(path: Path) -> Path:
    if path.is_dir():
        raise ConfigError(f"CONFIG: {path} is a directory; give a YAML file")
    if not path.is_file():
        raise ConfigError(f"CONFIG: {path} is not a regular file, and a run has to read it again; save it as a file")
    return path
