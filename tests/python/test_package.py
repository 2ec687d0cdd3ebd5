# SPDX-License-Identifier: Apache-2.0
"""The package as a newcomer meets it: what `import logitless` offers, what it says where a
framework is missing, and that the README's snippets run."""

from __future__ import annotations

import importlib.util
import pathlib
import re
from typing import Any

import pytest

import fresh
import logitless

README = pathlib.Path(__file__).resolve().parents[2] / "README.md"
# Code to put before a snippet that contains the key.
GIVEN = {
    "logitless.torch": """
import torch
hidden = torch.randn(2, 5, 8, requires_grad=True)
labels = torch.randint(0, 11, (2, 5))
lm_head = torch.nn.Linear(8, 11, bias=False)
""",
    "logitless.jax": """
import numpy as np
hidden, head = np.ones((2, 5, 8), np.float32), np.ones((11, 8), np.float32)
labels = np.zeros((2, 5), np.int32)
""",
    "logitless.numpy": """
import numpy as np
x, w = np.ones((5, 8), np.float32), np.ones((11, 8), np.float32)
target = np.zeros(5, np.int32)
""",
    "patch_transformers": """
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lm_head = torch.nn.Linear(8, 11)
    def get_output_embeddings(self):
        return self.lm_head
    def loss_function(self):
        pass
    loss_function.__name__ = "ForCausalLMLoss"
model = Model()
""",
}


def test_the_citation_and_the_changelog_name_this_version() -> None:
    root, version = README.parent, logitless.__version__
    assert f"\nversion: {version}\n" in (root / "CITATION.cff").read_text()
    changes = (root / "CHANGELOG.md").read_text()
    assert f"## [{version}]" in changes or f"version, {version}." in changes


@pytest.mark.parametrize("page", ["README.md", "python/README.md"])
def test_a_page_names_the_oldest_frameworks_that_the_package_takes(page: str) -> None:
    project = (README.parent / "pyproject.toml").read_text()
    least = re.findall(r'"(torch|jax|numpy)>=([\d.]+)"', project)
    names = {"torch": "PyTorch", "jax": "JAX", "numpy": "NumPy"}
    named = re.findall(r"(PyTorch|JAX|NumPy) (\d[\d.]*\d)", (README.parent / page).read_text())
    assert named == [(names[framework], version) for framework, version in least]


def snippets() -> list[tuple[str, str]]:
    """The README's Python code, each with the key of what it is given."""
    found = re.findall(r"^```python\n(.*?)^```", README.read_text(), flags=re.S | re.M)
    return [(next((word for word in GIVEN if word in code), ""), code) for code in found]


def test_every_snippet_of_the_readme_runs_where_the_ones_before_it_did() -> None:
    given = snippets()
    assert [code for word, code in given if not word] == [], "say here what a new snippet is given"
    assert {word for word, _ in given} == set(GIVEN)
    if importlib.util.find_spec("jax") is None:
        given = [(word, code) for word, code in given if word != "logitless.jax"]
    script = "".join(f"{GIVEN[word]}{code}" for word, code in given)
    fresh.run(script + "\nassert 'forward' in vars(model), 'the model was not patched'")


def test_a_module_is_there_without_being_imported_by_name() -> None:
    """A module is imported at its first use and needs only its own framework."""
    code = """
import sys, logitless
assert not {"torch", "numpy", "jax"} & set(sys.modules)
assert {"torch", "numpy", "integrations", "describe_backend", "__version__"} <= set(dir(logitless))
assert logitless.numpy.linear_cross_entropy and "torch" not in sys.modules
assert logitless.integrations.patch_transformers and logitless.torch.linear_cross_entropy
assert logitless.integrations.cce.linear_cross_entropy
assert not hasattr(logitless, "tensorflow")
try: logitless.tensorflow
except AttributeError as error: print(error)
"""
    assert fresh.run(code).strip() == "module 'logitless' has no attribute 'tensorflow'"


def test_every_name_of_the_integrations_is_listed_and_there() -> None:
    """Listing imports no framework."""
    code = """
import sys, importlib.util, pkgutil, logitless
assert not {"torch", "jax", "transformers", "trl"} & set(sys.modules)
package = logitless.integrations
listed = set(dir(package))
assert not {"torch", "jax"} & set(sys.modules)
modules = {m.name for m in pkgutil.iter_modules(package.__path__) if m.name[0] != "_"}
names = {*modules, *package.__all__}
assert {"transformers", "trl"} <= modules and names - listed <= {"levanter", "lm_eval", "tunix"}
for name, needed in ("levanter", "haliax"), ("lm_eval", "lm_eval"), ("tunix", "tunix"):
    assert (name in listed) == (importlib.util.find_spec(needed) is not None), name
for name in names & listed:
    assert getattr(package, name).__name__.rpartition(".")[2] == name, name
assert package.trl.patch_trl is package.patch_trl
from logitless.integrations import *
assert patch_trl is package.patch_trl and liger is package.liger and "trl" not in globals()
assert not {"jax", "transformers", "trl"} & set(sys.modules), "torch is all that these need"
"""
    fresh.run(code)


@pytest.mark.parametrize(
    ("missing", "module", "install"),
    [
        ("torch", "torch", "logitless.torch needs PyTorch 2.8 or newer: pip install torch"),
        (
            "torch",
            "integrations.patch_trl",
            "logitless.torch needs PyTorch 2.8 or newer: pip install torch",
        ),
        (
            "haliax",
            "integrations.levanter",
            "logitless.integrations.levanter needs haliax: pip install haliax",
        ),
        (
            "tunix",
            "integrations.tunix",
            "logitless.integrations.tunix needs Tunix: pip install google-tunix",
        ),
        (
            "lm_eval",
            "integrations.lm_eval",
            "logitless.integrations.lm_eval needs lm-evaluation-harness: pip install lm_eval[hf]",
        ),
        ("numpy", "numpy", "logitless.numpy needs NumPy 1.24 or newer: pip install numpy"),
        ("jax", "jax", "logitless.jax needs JAX 0.6.1 or newer: pip install jax"),
    ],
)
def test_a_missing_framework_is_named_with_its_remedy(
    missing: str, module: str, install: str
) -> None:
    package, _, name = f"logitless.{module}".rpartition(".")
    for way in (f"from {package} import {name}", f"import logitless; logitless.{module}"):
        done = fresh.attempt(f"import sys; sys.modules[{missing!r}] = None\n{way}")
        assert f"\nImportError: {install}\n" in done.stderr, done.stderr


def test_only_what_can_be_imported_is_listed() -> None:
    """inspect.getmembers and help ask for everything that is listed."""
    code = """
import importlib.util
real = importlib.util.find_spec
missing = ["jax"]
importlib.util.find_spec = lambda name, *rest: None if name in missing else real(name, *rest)
import logitless
print("jax" in dir(logitless), "torch" in dir(logitless))
package = logitless.integrations
print("levanter" in dir(package), "trl" in dir(package))
missing.append("torch")
print("liger" in dir(package), "trl" in dir(package), "patch_trl" in dir(package))
"""
    assert fresh.run(code).split() == ["False", "True"] * 2 + ["False"] * 3


@pytest.mark.parametrize("threads", [-3, 1 << 31, "3", 1.0, True, None])
def test_a_wrong_number_of_threads_is_refused(threads: Any) -> None:
    kind = ValueError if type(threads) is int else TypeError
    before = logitless.num_threads()
    with pytest.raises(kind, match=r"^threads is .*; allowed: "):
        logitless.set_num_threads(threads)
    assert logitless.num_threads() == before
