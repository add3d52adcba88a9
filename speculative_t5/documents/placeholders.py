"""What programs replace by values within their texts: it has to stay as it is written."""

# With printf and Java: %s, %1$d, %.2f, %lld, %-10s, %*d, %%; Apple: %@, %1$@, %arg, %#@name@;
# Python and Ruby: %(name)s, %{name}, %<name>s; Qt and KDE: %1, %L1; and C's %<PRId64>.
_PERCENT = r"""
    % (?:
        %
        | \#@\w+@
        | arg(?!\w)
        | <PRI[A-Za-z]+\d*>
        | \{\w+\} | <\w+>[a-zA-Z]
        | (?:\(\w+\)|\d+\$)? [-+0\#']*+ (?:\d++|\*)? (?:\.(?:\d++|\*))?
          (?:hh?|ll?|[jztLqwIv])? [a-zA-Z@] (?!\w)
        | L?\d{1,2}(?![\w.,])
    )
"""
# {name}, ${name}, {{name}}, {{ name }}, {}, {0,number}, {when, date, short}
_BRACES = r"""
    \$? (?<!\{) \{++ (?:
        [^{}\s]*+
        | [ ] [^{}\s]++ [ ]
        | \w++ , \s? (?:number|date|time|spellout|ordinal|duration|list)\b [^{}\n]{0,100}
    ) \}+
"""
# To be used with re.VERBOSE; it has no groups that capture.
PLACEHOLDER_PATTERN = rf"(?:{_BRACES} | {_PERCENT})"
# A message that says another thing for each number or kind, with words between its own signs.
CHOICES_PATTERN = r"\{\s{0,9}\w+\s{0,9},\s{0,9}(?:plural|select|selectordinal|choice)\s{0,9},"
# A tag of HTML or XML.
TAG_PATTERN = r"</?[A-Za-z][^<>]*>"
