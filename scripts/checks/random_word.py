"""Random documents of Word for `random_documents.py`, with all that documents have beside words.

Words that have to stay, or are not read, begin with a q. `word_faults` says what has changed.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from zipfile import ZipFile

from random_words import Words

OTHERS = 'w:author="Bob" w:date="2020-01-01T00:00:00Z"'
OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006"
NAMESPACES = (
    'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main" '
    f'xmlns:m="{OFFICE}/math" xmlns:r="{OFFICE}/relationships" '
    'xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006" '
    'xmlns:wps="http://schemas.microsoft.com/office/word/2010/wordprocessingShape" '
    'xmlns:w14="http://schemas.microsoft.com/office/word/2010/wordml" '
    'xmlns:wp="http://schemas.openxmlformats.org/drawingml/2006/wordprocessingDrawing" '
    'xmlns:a="http://schemas.openxmlformats.org/drawingml/2006/main" '
    'xmlns:v="urn:schemas-microsoft-com:vml"'
)
LOOKS = (
    "",
    "",
    "<w:b/>",
    "<w:i/>",
    "<w:b/><w:i/>",
    '<w:vertAlign w:val="superscript"/>',
    '<w:rFonts w:ascii="Arial" w:cs="Arial"/><w:color w:val="FF0000"/><w:sz w:val="20"/>',
    '<w:rStyle w:val="a"/><w:highlight w:val="yellow"/><w:lang w:val="en-US"/>',
    f'<w:b/><w:rPrChange w:id="{{id}}" {OTHERS}><w:rPr/></w:rPrChange>',
)
BETWEEN_RUNS = (
    '<w:bookmarkStart w:id="{id}" w:name="a{id}"/>',
    '<w:bookmarkEnd w:id="1"/>',
    '<w:commentRangeStart w:id="0"/>',
    '<w:commentRangeEnd w:id="0"/>',
    '<w:proofErr w:type="gramStart"/>',
    '<w:permStart w:id="{id}" w:edGrp="everyone"/>',
    '<w:moveFromRangeStart w:id="{id}" w:name="m"/>',
    "<m:oMath><m:r><m:t>x</m:t></m:r></m:oMath>",
    "<m:oMath><m:r><w:rPr><w:i/></w:rPr><m:t>x</m:t></m:r><w:r><w:t>q</w:t></w:r></m:oMath>",
    "<m:oMathPara><m:oMath><m:r><m:t>x</m:t></m:r></m:oMath></m:oMathPara>",
    "<w:r/>",
    "<w:r><w:t/></w:r>",
    "<w:r><w:rPr><w:b/></w:rPr></w:r>",
    "<!-- a -->",
    "\n  ",
)
IN_RUNS = (
    "<w:softHyphen/>",
    "<w:noBreakHyphen/>",
    "<w:noBreakHyphen/>",
    "<w:tab/>",
    "<w:br/>",
    '<w:br w:type="page"/>',
    "<w:cr/>",
    '<w:ptab w:relativeTo="margin" w:alignment="right" w:leader="none"/>',
    '<w:sym w:font="Symbol" w:char="F0B1"/>',
    "<w:drawing/>",
    "<w:object/>",
    "<w:pict/>",
    '<w:footnoteReference w:id="2"/>',
    '<w:endnoteReference w:id="2"/>',
    '<w:commentReference w:id="0"/>',
    "<w:annotationRef/>",
    "<w:lastRenderedPageBreak/>",
    "<w:pgNum/>",
    '<mc:AlternateContent><mc:Choice Requires="w14"><w14:a/></mc:Choice><mc:Fallback><w:t>qa</w:t>'
    "</mc:Fallback></mc:AlternateContent>",
)
BEHIND_WORDS = (" ", " ", " ", "", ", ", "  ", ". ", "? ", " &amp; ", " &lt; ", "&#x2019;", "\n")
BEHIND_WORDS += ("\u00a0", "\t", " \U0001f600 ", "e\u0301 ", "- ", "; ")
FILLED = ("DATE", " PAGE ", "REF a \\h", "TOC", "IF", "MERGEFIELD a")
FILLED_CONTROLS = (
    '<w:dataBinding w:xpath="a"/>',
    "<w:dropDownList/>",
    "<w:date/>",
    "<w14:checkbox/>",
)


@dataclass
class _Maker:
    """Makes the XML of one document."""

    words: Words
    ids: int = 1
    depth: int = 0

    def id(self) -> int:
        """Return another number for a change or a bookmark."""
        self.ids += 1
        return self.ids

    def word(self, *, stays: bool) -> str:
        return "q" * stays + self.words.new()

    def text(self, *, stays: bool, tag: str = "w:t") -> str:
        """Return an element with words, some with white space that is not shown."""
        draw = self.words.draw
        text = "".join(
            self.word(stays=stays) + draw.choice(BEHIND_WORDS) for _ in range(draw.randint(1, 3))
        )
        if draw.random() < 0.1:
            text = " " + text
        if stays and draw.random() < 0.1:
            return f"<{tag}>{text}<!-- a -->{text}</{tag}>"
        space = draw.choice(['xml:space="preserve"'] * 9 + ["", 'xml:space="default"'])
        return f"<{tag} {space}>{text}</{tag}>"

    def run(self, *, stays: bool = False, tag: str = "w:t") -> str:
        draw = self.words.draw
        looks = draw.choice(LOOKS).replace("{id}", str(self.id()))
        inner = [self.text(stays=stays, tag=tag)]
        while draw.random() < 0.25:
            inner.append(draw.choice(IN_RUNS) if draw.random() < 0.7 else inner[0])
            if inner[-1] == inner[0]:
                inner[-1] = self.text(stays=stays, tag=tag)
        if draw.random() < 0.1:
            inner.reverse()
        if self.depth < 3 and not stays and draw.random() < 0.04:
            inner.append(self.box())
        own = f"<w:rPr>{looks}</w:rPr>" if looks else ""
        revision = draw.choice(["", ' w:rsidR="00AA00AA"'])
        return f"<w:r{revision}>{own}{''.join(inner)}</w:r>"

    def runs(self, *, stays: bool = False) -> str:
        draw = self.words.draw
        return "".join(
            self.run(stays=stays) + (self.between() if draw.random() < 0.2 else "")
            for _ in range(draw.choice([1, 1, 2]))
        )

    def between(self) -> str:
        return self.words.draw.choice(BETWEEN_RUNS).replace("{id}", str(self.id()))

    def box(self) -> str:
        """Return a text box, as Word writes it since 2010 or as it did before."""
        inner, other = (f"<w:txbxContent>{self.blocks(1)}</w:txbxContent>" for _ in range(2))
        old = f"<w:pict><v:shape><v:textbox>{other}</v:textbox></v:shape></w:pict>"
        kind = self.words.draw.random()
        if kind < 0.3:
            return old
        new = (
            "<w:drawing><wp:inline><a:graphic><a:graphicData><wps:wsp><wps:txbx>"
            f"{inner}</wps:txbx></wps:wsp></a:graphicData></a:graphic></wp:inline></w:drawing>"
        )
        return (
            f'<mc:AlternateContent><mc:Choice Requires="wps">{new}</mc:Choice>'
            f"<mc:Fallback>{old}</mc:Fallback></mc:AlternateContent>"
        )

    def blocks(self, most: int) -> str:
        self.depth += 1
        draw = self.words.draw
        made = []
        for _ in range(draw.randint(1, most)):
            kind = draw.random() if self.depth < 3 else 1
            if kind < 0.08:
                cells = (f"<w:tc><w:tcPr/>{self.blocks(2)}</w:tc>" for _ in range(2))
                row = "<w:tr>" + "".join(cells) + "</w:tr>"
                made.append(f"<w:tbl><w:tblPr/><w:tblGrid/>{row}</w:tbl><w:p/>")
            elif kind < 0.12:
                made.append(self.control(self.blocks(1)))
            elif kind < 0.16:
                stays = "".join(f"<w:p>{self.run(stays=True)}</w:p>" for _ in range(2))
                begin, end = self.field_marks("TOC")
                made.append(f"<w:p>{begin}</w:p>{stays}<w:p>{end}{self.inlines()}</w:p>")
            else:
                made.append(f"<w:p>{self.properties()}{self.inlines()}</w:p>")
        self.depth -= 1
        return "".join(made)

    def properties(self) -> str:
        change = f'<w:ins w:id="{self.id()}" {OTHERS}/>'
        style = '<w:pStyle w:val="a"/>'
        return self.words.draw.choice(
            ["", "", f"<w:pPr>{style}</w:pPr>", f"<w:pPr>{style}<w:rPr>{change}</w:rPr></w:pPr>"]
        )

    def inlines(self) -> str:
        draw = self.words.draw
        return "".join(
            (draw.choice(INLINES)(self) if draw.random() < 0.55 else self.run())
            + (self.between() if draw.random() < 0.3 else "")
            for _ in range(draw.randint(1, 5))
        )

    # What is in a paragraph beside runs.

    def link(self) -> str:
        return f'<w:hyperlink w:anchor="x">{self.runs()}</w:hyperlink>'

    def simple_field(self) -> str:
        if self.words.draw.random() < 0.3:
            return f'<w:fldSimple w:instr=" HYPERLINK x">{self.runs()}</w:fldSimple>'
        kind = self.words.draw.choice(FILLED)
        inner = f'<w:fldSimple w:instr="HYPERLINK x">{self.runs(stays=True)}</w:fldSimple>'
        inner = inner if self.words.draw.random() < 0.2 else self.runs(stays=True)
        return f'<w:fldSimple w:instr="{kind}">{inner}</w:fldSimple>'

    def field_marks(self, code: str, tag: str = "w:instrText") -> tuple[str, str]:
        """Return how a field begins, up to what it shows, and how it ends."""
        mark = '<w:r><w:fldChar w:fldCharType="{}"/></w:r>'
        cut = self.words.draw.randint(0, len(code))
        pieces = (code[:cut], code[cut:])
        codes = "".join(
            f'<w:r><w:{tag[2:]} xml:space="preserve">{each}</w:{tag[2:]}></w:r>' for each in pieces
        )
        return mark.format("begin") + codes + mark.format("separate"), mark.format("end")

    def field(self) -> str:
        draw = self.words.draw
        begin, end = self.field_marks(draw.choice(FILLED))
        filled = begin + self.runs(stays=True) + end
        kind = draw.random()
        if kind < 0.4:
            return filled
        link_begin, link_end = self.field_marks("HYPERLINK x")
        if kind < 0.7:
            inner = filled if draw.random() < 0.3 else ""
            return link_begin + self.runs() + inner + self.runs() + link_end
        if kind < 0.8:
            return begin + link_begin + self.runs(stays=True) + link_end + end
        mark = '<w:r><w:fldChar w:fldCharType="{}"/></w:r>'
        code = "<w:r><w:instrText>HYPERLINK </w:instrText></w:r>"
        middle = mark.format("separate") + self.runs() + mark.format("end")
        return mark.format("begin") + code + filled + middle

    def field_in_deletion(self) -> str:
        """Return a field that begins or ends in a deletion, or is deleted."""
        begin, end = self.field_marks(self.words.draw.choice(FILLED), "w:delInstrText")
        deleted = f'<w:del w:id="{self.id()}" {OTHERS}>{{}}</w:del>'
        inner = self.runs(stays=True)
        return self.words.draw.choice(
            [
                deleted.format(begin) + inner + end,
                begin + inner + deleted.format(end),
                deleted.format(begin + self.run(stays=True, tag="w:delText") + end),
            ]
        )

    def insertion(self) -> str:
        draw = self.words.draw
        inner = "".join(
            draw.choice([self.run, self.run, self.smart_tag, self.deletion])() for _ in range(2)
        )
        return f'<w:ins w:id="{self.id()}" {OTHERS}>{inner}</w:ins>'

    def deletion(self) -> str:
        gone = self.run(stays=True, tag="w:delText")
        if self.words.draw.random() < 0.2:
            inner = f"<w:txbxContent><w:p>{self.runs(stays=True)}</w:p></w:txbxContent>"
            gone = f"<w:r><w:pict><v:shape><v:textbox>{inner}</v:textbox></v:shape></w:pict></w:r>"
        return f'<w:del w:id="{self.id()}" {OTHERS}>{gone}</w:del>'

    def moved(self) -> str:
        gone = f'<w:moveFrom w:id="{self.id()}" {OTHERS}>{self.runs(stays=True)}</w:moveFrom>'
        come = f'<w:moveTo w:id="{self.id()}" {OTHERS}>{self.runs()}{self.runs()}</w:moveTo>'
        return self.words.draw.choice([gone, come, gone + self.run() + come])

    def smart_tag(self) -> str:
        kind = self.words.draw.choice(['smartTag w:element="a"', 'customXml w:element="a"', "bdo"])
        return f"<w:{kind}>{self.runs()}</w:{kind.split()[0]}>"

    def control(self, inner: str, kind: str = "<w:text/>") -> str:
        properties = f'<w:sdtPr><w:id w:val="1"/>{kind}</w:sdtPr>'
        return f"<w:sdt>{properties}<w:sdtContent>{inner}</w:sdtContent></w:sdt>"

    def inline_control(self) -> str:
        if self.words.draw.random() < 0.5:
            return self.control(self.runs())
        return self.control(self.runs(stays=True), self.words.draw.choice(FILLED_CONTROLS))

    def ruby(self) -> str:
        reading = f"<w:rt>{self.run(stays=True)}</w:rt>"
        return f"<w:r><w:ruby>{reading}<w:rubyBase>{self.run()}</w:rubyBase></w:ruby></w:r>"

    def alternative(self) -> str:
        choice = f'<mc:Choice Requires="w14">{self.runs()}</mc:Choice>'
        other = f"<mc:Fallback>{self.runs(stays=True)}</mc:Fallback>"
        return f"<mc:AlternateContent>{choice}{other}</mc:AlternateContent>"


INLINES: Sequence[Callable[[_Maker], str]] = (
    _Maker.link,
    _Maker.simple_field,
    _Maker.field,
    _Maker.field_in_deletion,
    _Maker.insertion,
    _Maker.insertion,
    _Maker.deletion,
    _Maker.moved,
    _Maker.smart_tag,
    _Maker.inline_control,
    _Maker.ruby,
    _Maker.alternative,
)
DECLARATION = '<?xml version="1.0" encoding="UTF-8" standalone="yes"?>\r\n'
KINDS_OF_PARTS = ("header", "footer", "footnotes", "endnotes")


def _package_around() -> dict[str, bytes]:
    """Return the files of a package but those with words."""
    of_word = "application/vnd.openxmlformats-officedocument.wordprocessingml"
    kinds = ["document.main", *KINDS_OF_PARTS, "comments", "styles"]
    types = "".join(
        f'<Override PartName="/word/{kind.partition(".")[0]}.xml" '
        f'ContentType="{of_word}.{kind}+xml"/>'
        for kind in kinds
    )
    relations = "".join(
        f'<Relationship Id="rId{number}" Type="{OFFICE}/relationships/{kind}" Target="{kind}.xml"/>'
        for number, kind in enumerate(kinds[1:], 1)
    )
    of_package = "http://schemas.openxmlformats.org/package/2006"
    texts = {
        "[Content_Types].xml": (
            f'<Types xmlns="{of_package}/content-types"><Default Extension="rels" '
            'ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
            f'<Default Extension="xml" ContentType="application/xml"/>{types}</Types>'
        ),
        "_rels/.rels": (
            f'<Relationships xmlns="{of_package}/relationships"><Relationship Id="rId1" '
            f'Type="{OFFICE}/relationships/officeDocument" Target="word/document.xml"/>'
            "</Relationships>"
        ),
        "word/_rels/document.xml.rels": (
            f'<Relationships xmlns="{of_package}/relationships">{relations}</Relationships>'
        ),
        "word/comments.xml": (
            f'<w:comments {NAMESPACES}><w:comment w:id="0" w:author="a"><w:p><w:r><w:t>qa</w:t>'
            "</w:r></w:p></w:comment></w:comments>"
        ),
        "word/styles.xml": (
            f'<w:styles {NAMESPACES}>\n<w:style w:type="paragraph" w:styleId="a" >'
            '<w:name w:val="a"/></w:style></w:styles>'
        ),
    }
    return {name: (DECLARATION + text).encode() for name, text in texts.items()}


AROUND = _package_around()


def docx(words: Words) -> bytes:
    """Return a document of Word."""
    maker = _Maker(words)
    references = "".join(
        f'<w:{kind}Reference w:type="default" r:id="rId{number}"/>'
        for number, kind in enumerate(KINDS_OF_PARTS[:2], 1)
    )
    end = f"<w:sectPr>{references}</w:sectPr>"
    parts = {"document": f"<w:body>{maker.blocks(3)}{end}</w:body>"}
    for kind in KINDS_OF_PARTS:
        inner = maker.blocks(1) if words.draw.random() < 0.15 else "<w:p/>"
        if kind.endswith("notes"):
            note, mark = f"w:{kind[:-1]}", f"<w:r><w:{kind[:-1]}Ref/></w:r>"
            line = f'<{note} w:type="separator" w:id="0"><w:p><w:r><w:separator/></w:r></w:p>'
            inner = f'{line}</{note}><{note} w:id="2"><w:p>{mark}</w:p>{inner}</{note}>'
        parts[kind] = inner
    roots = {"document": "document", "header": "hdr", "footer": "ftr"}
    file = io.BytesIO()
    with ZipFile(file, "w") as package:
        for name, data in AROUND.items():
            package.writestr(name, data)
        for kind, inner in parts.items():
            root = f"w:{roots.get(kind, kind)}"
            text = f"{DECLARATION}<{root} {NAMESPACES}>{inner}</{root}>"
            package.writestr(f"word/{kind}.xml", text)
    return file.getvalue()
