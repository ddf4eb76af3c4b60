"""The errors that a user can cause: each message says what was got, what was expected and what to do."""


class VitinitError(Exception):
    """Base of every error that vitinit raises on purpose."""


class ConstructionError(VitinitError, ValueError):
    """A convolution or a setting that the head construction cannot express."""


class ConversionError(VitinitError):
    """A network that could not be converted, or whose conversion did not reproduce its logits."""


class RecipeError(VitinitError):
    """A recipe that is unknown, malformed or contradictory."""


class DataError(VitinitError):
    """A data set that is missing, ambiguous, too small or damaged."""


class SourceError(VitinitError):
    """A source CNN that could not be found or loaded."""


class TrainingError(VitinitError):
    """A training that went wrong while it ran."""


class CheckpointError(VitinitError):
    """A run state or an export that is missing, incomplete or of another network."""


def check_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise a ConstructionError where a setting is none of its choices."""
    if value not in choices:
        raise ConstructionError(f"{key}={value!r} is unknown: expected one of {', '.join(choices)}")
