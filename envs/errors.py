"""The one exception for mistakes a user can make in settings: always one clear sentence."""


class ConfigError(ValueError):
    """A setting, id, role or file that cannot be used; the message names the wrong value and the right ones."""
