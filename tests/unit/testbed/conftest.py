import json

import pytest
from task_cases import NATURAL, PARTS
from training_cases import VOCABULARY, run

from kvlab.testbed import prepared as preparing
from kvlab.testbed.prepared import prepare


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("testbed")
    pages = NATURAL.split(". ")
    documents = [
        {
            "package": "p",
            "language": ("en", "de")[number % 2],
            "name": str(number),
            "text": text,
            "held_out": number % 7 == 0,
        }
        for number, text in enumerate(". ".join(pages[start : start + 20]) for start in range(0, len(pages), 20))
    ]
    (made / "text.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparing, "VOCABULARY", VOCABULARY)
        prepare(made / "text.jsonl", made / "prepared", PARTS)
    return made / "prepared"


@pytest.fixture(scope="session")
def trained(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    return out, run(folder, out)
