"""The demo's recipe over several seeds: source CNN, construction and random init on 10 % of scikit-learn's digits.

python benchmarks/digits.py --out benchmarks/results/digits.json
"""

import argparse
import json
import statistics
from pathlib import Path

from low_data import confidence_interval, run_cell


def main() -> None:
    """Run the seeds, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/digits_seeds"))
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    cells = [run_cell("digits_10pct", args.runs / f"seed{seed}", [f"seed={seed}"]) for seed in range(args.seeds)]
    arms = {
        "source CNN (stage 1)": [cell["source"]["accuracy"] for cell in cells],
        "construction, step 0": [cell["step0"]["accuracy"] for cell in cells],
        "construction, fine-tuned": [cell["accuracy"] for cell in cells],
        "random init, as many images seen": [cell["random"]["accuracy"] for cell in cells],
    }
    gains = [cell["accuracy"] - cell["random"]["accuracy"] for cell in cells]
    rows = [
        {"arm": arm, "accuracy": values, "mean": statistics.mean(values), "interval95": confidence_interval(values)}
        for arm, values in {**arms, "construction minus random": gains}.items()
    ]
    for row in rows:
        print(f"{row['arm']:34} {row['mean']:7.1%} ± {row['interval95']:.1%}  n={args.seeds}")
    content = {
        "script": "benchmarks/digits.py",
        "recipe": "digits_10pct",
        "n": args.seeds,
        "n_train": cells[0]["n_train"],
        "n_test": cells[0]["n_test"],
        "rows": rows,
        "environment": cells[-1]["environment"],
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
