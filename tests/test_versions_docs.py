"""docs/howto/versions.md is executed: its models, its forms, what it shows at the prompt."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "howto/versions.md"

BEFORE = """
import asyncio
import django
from django.conf import settings
settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    INSTALLED_APPS=[f"django.contrib.{name}" for name in ("admin", "auth", "contenttypes", "messages")],
    SECRET_KEY="x",
    USE_TZ=True,
)
django.setup()
from django.db import connection, models, transaction
from django.shortcuts import get_object_or_404, redirect, render
import sys, types
sys.modules["rates"] = types.ModuleType("rates")

DATABASES = settings.DATABASES

class PlainRate(models.Model):
    name = models.CharField(primary_key=True, max_length=20)
    value = models.IntegerField()
    class Meta:
        app_label = "rates"

class Line(models.Model):
    class Meta:
        app_label = "rates"
"""

SETUP = """
import doctest, os
from pymongo import MongoClient
with connection.schema_editor() as editor:
    for model in (PlainRate, PastRate, Rate, Ad):
        editor.create_model(model)
Rate.objects.create(name="EUR", value=1)
set_rate("EUR", 2)
assert (Rate.objects.get().value, PastRate.objects.get().value) == (2, 1)
Rate.objects.all().delete()
Rate.objects.create(name="EUR", value=1000)
example = doctest.DocTestParser().get_doctest(PROMPT, globals(), "versions.md", "versions.md", 0)
assert doctest.DocTestRunner().run(example).failed == 0
ad = Ad.objects.create(title="a")
assert Ad._meta.get_field("document_version").column == "documentVersion"
"""

AFTER = """
assert Rate.objects.get().value == 1101
move(1, 2, 3)
asyncio.run(approve(1))
assert RateForm(instance=Rate.objects.get())["version_read"].value()
assert admin.site._registry[Rate].check() == []
"""

COLLECTION = """
collection = MongoClient(os.environ["MONGODB_URI"])[os.environ["MONGODB_NAME"]]["rates"]
collection.insert_one({"_id": "EUR", "value": 1})
"""


def blocks(kind: str) -> list[str]:
    """The code of the page, in order."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.long
def test_the_page_runs(mongo: MongoClient[dict[str, Any]], mongo_uri: str) -> None:
    """Every block, one after the other, and the prompt word for word."""
    plain, model, bare, attempt, block, transaction, sqlite, form, view, admin, update, aupdate = blocks("python")
    (prompt,) = blocks("pycon")
    for name in ("Rate(VersionedModel)", "PastRate(models.Model)", "Ad(models.Model)"):  # outside of an app
        end = "\n    class Meta:\n        app_label = 'rates'\n"
        model, bare = (
            re.sub(rf"(class {re.escape(name)}:.*\n(?:    .*\n|\n(?=    ))+)", rf"\1{end}", code)
            for code in (model, bare)
        )
    aupdate = "async def later():\n" + "".join(f"    {line}\n" for line in aupdate.splitlines()) + "    return after\n"
    checks = "assert after['value'] == 2, after\nassert asyncio.run(later())['documentVersion'] == 1\n"
    code = [BEFORE, plain, model, bare, f"PROMPT = {prompt!r}\n", SETUP, attempt, block, transaction]
    script = "\n".join(
        [*code, sqlite, form, view, admin, AFTER, COLLECTION, update, aupdate, checks, 'print("all is well")']
    )
    name = f"versions_docs_{uuid.uuid4().hex[:8]}"
    environment = {**os.environ, "MONGODB_URI": mongo_uri, "MONGODB_NAME": name}
    try:
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
        )
    finally:
        mongo.drop_database(name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "all is well\n"
