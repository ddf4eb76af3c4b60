"""Fine-tune a converted CNN as a recipe says: accelerate launch finetune.py --recipe cifar100_10pct"""

import argparse
import sys
from pathlib import Path

from vitinit.errors import VitinitError
from vitinit.recipe import list_recipes, load_recipe
from vitinit.run import run_recipe
from vitinit.train import Interrupted


def main() -> int:
    """Parse the command line, carry out the recipe and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, epilog=f"recipes: {', '.join(list_recipes())}")
    parser.add_argument("--recipe", required=True, help="name of a recipe, or a YAML file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override, e.g. train.lr=1e-3")
    parser.add_argument("--out", type=Path, help="results folder (default: runs/RECIPE)")
    parser.add_argument("--resume", action="store_true", help="go on with an interrupted run")
    parser.add_argument("--overwrite", action="store_true", help="replace what the results folder holds")
    parser.add_argument("--dry-run", action="store_true", help="print recipe, conversion, steps and time only")
    args = parser.parse_args()
    try:
        recipe = load_recipe(args.recipe, overrides=args.set)
        out = args.out or Path("runs") / recipe.name
        run_recipe(recipe, out=out, resume=args.resume, overwrite=args.overwrite, dry_run=args.dry_run)
    except VitinitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (Interrupted, KeyboardInterrupt) as stop:  # the second comes before or after a training
        print(f"{str(stop) or 'stopped'}; go on with the same command and --resume", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
