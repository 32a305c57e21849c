"""A page as one HTML file that asks nothing of any network.

Owns the templates and what they are given. Everything is escaped but our own SVG.
"""

from __future__ import annotations

import jinja2

from serving.studies.report.content import Page
from serving.studies.report.plots import INKS

_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("serving.studies.report"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def to_html(page: Page) -> str:
    """The page as an HTML document."""
    return _TEMPLATES.get_template("page.html.jinja").render(inks=INKS, page=page)
