"""What transformers' `clean_up_tokenization_spaces` does to a text, whole or as it arrives."""

# In this order, as each works on what those before it have left.
_REPLACED = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)
# Words after a space that the next characters could turn into one of those.
_OPEN = frozenset({"", "'", "n", "n'", "'v", "'r", "v", "r"})


def clean_up(text: str) -> str:
    """Return a text without the spaces that English has none of: before a comma, within don't."""
    for found, replacement in _REPLACED:
        text = text.replace(found, replacement)
    return text


class CleanUp:
    """Cleans a text as it arrives: the parts joined are the whole text cleaned.

    What the next characters could change is held back until they have come, or until `finish`.
    """

    def __init__(self) -> None:
        self._held = ""

    def add(self, text: str) -> str:
        """Return what can no longer change, cleaned."""
        whole = self._held + text
        end = len(whole)
        # Back to the first of the last words that are all open.
        while (space := whole.rfind(" ", 0, end)) >= 0 and whole[space + 1 : end] in _OPEN:
            end = space
        self._held = whole[end:]
        return clean_up(whole[:end])

    def finish(self) -> str:
        """Return the text still held back."""
        rest, self._held = clean_up(self._held), ""
        return rest
