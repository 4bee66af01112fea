"""The lazy hook in processes of their own, most of them with a small stand-in for torchrec and for registration."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

#: Before the script: a registration that only counts, so that a process starts in milliseconds.
COUNTING = """
import sys, types
calls = []
stub = types.ModuleType("turbogr_plugin.registration")
def register():
    calls.append(sys.modules["torchrec"].__dict__.get("READY"))
    return types.SimpleNamespace(refused=[])
stub.register = register
sys.modules["turbogr_plugin.registration"] = stub
"""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Path]:
    """A folder with packages that call themselves torchrec, to be put first on the path."""
    package = tmp_path / "torchrec"
    package.mkdir()
    (package / "__init__.py").write_text("import torchrec.part\nREADY = True\n")
    (package / "part.py").write_text("import torchrec\nVALUE = 7\n")
    (package / "__main__.py").write_text("import sys\nprint('main', sys.modules['torchrec'].READY)\n")
    return tmp_path


def python(
    code: str, *path: Path, options: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh process with these folders first on the path."""
    variables = {
        **{name: value for name, value in os.environ.items() if name not in ("TURBOGR_AUTOLOAD", "PYTHONPATH")},
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        **environment,
    }
    command = [sys.executable, *options, *(["-c", code] if code else [])]
    return subprocess.run(command, capture_output=True, text=True, env=variables, timeout=60, check=False)


def ok(code: str, *path: Path, options: tuple[str, ...] = (), **environment: str) -> str:
    """What the code has printed; it must not have failed, nor warned."""
    done = python(code, *path, options=options, **environment)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def test_importing_the_package_installs_the_hook_and_loads_nothing_heavy() -> None:
    code = (
        "import sys, turbogr_plugin\n"
        "print(sorted({'torch', 'torchrec', 'fbgemm_gpu', 'triton', 'numpy'} & set(sys.modules)))\n"
        "print(sorted(name for name in sys.modules if name.startswith('turbogr_plugin')))\n"
        "print(sys.meta_path[0].__module__)\n"
    )
    assert ok(code).splitlines() == [
        "[]",
        "['turbogr_plugin', 'turbogr_plugin.backend', 'turbogr_plugin.backend.autoload']",
        "turbogr_plugin.backend.autoload",
    ]


def test_torch_is_told_of_the_hook_by_an_entry_point() -> None:
    (entry,) = importlib.metadata.entry_points(group="torch.backends", name="turbogr_plugin")
    assert entry.value == "turbogr_plugin.backend.autoload:install"


def test_importing_torch_loads_the_hook_alone_and_the_switch_turns_it_off() -> None:
    code = (
        "import sys, torch\n"
        "ours = [name for name in sys.modules if name.startswith('turbogr_plugin')]\n"
        "print(len(sys.modules) - len(ours), sorted(ours), 'torchrec' in sys.modules)\n"
        "print([finder.__module__ for finder in sys.meta_path if finder.__module__.startswith('turbogr_plugin')])\n"
    )
    hook, off = (ok(code, TURBOGR_AUTOLOAD=value).splitlines() for value in ("1", "0"))
    assert hook[1] == "['turbogr_plugin.backend.autoload']"
    assert off[1] == "[]"
    modules, _, ours = hook[0].partition(" ")
    assert ours == "['turbogr_plugin', 'turbogr_plugin.backend', 'turbogr_plugin.backend.autoload'] False"
    assert off[0].split()[0] == modules  # nothing else is imported by it


@pytest.mark.parametrize(
    "code",
    [
        "import turbogr_plugin\nassert not calls\nimport torchrec",
        "import turbogr_plugin\nimport torchrec.part\nassert torchrec.part.VALUE == 7",
        "import torchrec\nassert not calls\nimport turbogr_plugin",
        "import turbogr_plugin, turbogr_plugin.backend.autoload as hook\nhook.install(); hook.install()\n"
        "import torchrec\nhook.install(); hook.install()\ncalls[1:] = []",
    ],
    ids=["before", "before, of a part", "after", "installed again and again"],
)
def test_torchrec_is_adapted_once_and_when_it_is_whole(hosts: Path, code: str) -> None:
    left = "any(finder.__module__.startswith('turbogr') for finder in sys.meta_path)"
    end = f"\nprint(calls, type(torchrec.__spec__).__name__, {left})"
    assert ok(COUNTING + code + end, hosts).strip() == "[True] ModuleSpec False"


def test_the_switch_leaves_the_explicit_call(hosts: Path) -> None:
    code = "import turbogr_plugin, torchrec\nassert not calls\nturbogr_plugin.register()\nprint(calls)"
    assert ok(COUNTING + code, hosts, TURBOGR_AUTOLOAD="0").strip() == "[True]"


def test_a_hook_that_comes_in_the_middle_of_torchrecs_import_waits_for_its_end(hosts: Path) -> None:
    (hosts / "torchrec/part.py").write_text("import turbogr_plugin\n")  # as `import torch` does there
    assert ok(COUNTING + "import torchrec\nprint(calls)", hosts).strip() == "[True]"


@pytest.mark.parametrize("end", ["WHOLE = True", "raise OSError('not this one')"])
def test_a_module_of_ours_that_imports_torchrec_first_is_whole_when_registration_runs(hosts: Path, end: str) -> None:
    (hosts / "outer.py").write_text("import turbogr_plugin.inner\nWHOLE = True\n")
    (hosts / "inner.py").write_text(f"import torchrec\n{end}\n")
    code = (
        "import turbogr_plugin\n"
        f"turbogr_plugin.__path__.append({str(hosts)!r})\n"
        "seen = []\n"
        "def register():\n"
        "    modules = [sys.modules.get(f'turbogr_plugin.{name}') for name in ('outer', 'inner')]\n"
        "    seen.append([getattr(module, 'WHOLE', None) for module in modules])\n"
        "    return types.SimpleNamespace(refused=[])\n"
        "stub.register = register\n"
        "try:\n    import turbogr_plugin.outer\n"
        "except OSError as error:\n    print(error)\n"
        "print(seen)\n"
    )
    expected = ["[[True, True]]"] if end == "WHOLE = True" else ["not this one", "[[None, None]]"]
    assert ok(COUNTING + code, hosts).splitlines() == expected


def test_reloading_torchrec_adapts_nothing_again_and_keeps_working(hosts: Path) -> None:
    code = (
        "import importlib, turbogr_plugin, torchrec\n"
        "assert importlib.reload(torchrec) is torchrec\n"
        "import importlib.util\n"
        "print(calls, torchrec.READY, importlib.util.find_spec('torchrec').name)\n"
    )
    assert ok(COUNTING + code, hosts).strip() == "[True] True torchrec"


def test_an_import_of_torchrec_that_fails_fails_as_without_the_hook_and_the_next_one_is_adapted(hosts: Path) -> None:
    init = hosts / "torchrec/__init__.py"
    whole = init.read_text()
    init.write_text("raise OSError('no such library')\n")
    code = (
        "import turbogr_plugin, importlib, pathlib\n"
        "try:\n    import torchrec\n"
        "except OSError as error:\n    print(error, calls)\n"
        f"pathlib.Path({str(init)!r}).write_text({whole!r} + '# another length')\n"
        "importlib.invalidate_caches()\n"
        "import torchrec\nprint(calls)\n"
    )
    assert ok(COUNTING + code, hosts).splitlines() == ["no such library []", "[True]"]


def test_a_process_without_torchrec_says_so_as_without_the_hook(tmp_path: Path) -> None:
    code = (
        "import sys, turbogr_plugin\n"
        "sys.meta_path = [f for f in sys.meta_path if f.__module__.startswith('turbogr')]\n"
        "try:\n    import torchrec\n"
        "except ModuleNotFoundError as error:\n    print(error)\n"
    )
    assert ok(code).strip() == "No module named 'torchrec'"


def test_python_dash_m_runs_a_module_of_torchrec(hosts: Path) -> None:
    # sitecustomize imports the plugin before the module is run
    (hosts / "sitecustomize.py").write_text(COUNTING + "import turbogr_plugin\n")
    assert ok("", hosts, options=("-m", "torchrec")).strip() == "main True"


def test_spawned_and_forked_processes_are_adapted_too(hosts: Path) -> None:
    (hosts / "counting.py").write_text(COUNTING)
    (hosts / "program.py").write_text(
        "import counting, turbogr_plugin, multiprocessing, pickle, sys\n"
        "def work(queue):\n"
        "    import torchrec\n"
        "    queue.put((torchrec.READY, counting.calls))\n"
        "if __name__ == '__main__':\n"
        "    for way in ('spawn', 'fork'):\n"
        "        context = multiprocessing.get_context(way)\n"
        "        queue = context.Queue()\n"
        "        child = context.Process(target=work, args=(queue,))\n"
        "        child.start(); print(queue.get(timeout=30)); child.join()\n"
        "    import torchrec\n"
        "    print(pickle.loads(pickle.dumps(torchrec.__spec__)).name)\n"
    )
    printed = ok("", hosts, options=(str(hosts / "program.py"),)).splitlines()
    assert printed == ["(True, [True])", "(True, [True])", "torchrec"]


BROKEN = """
import sys, types
stub = types.ModuleType("turbogr_plugin.registration")
def register():
    raise RuntimeError("this plugin is broken")
stub.register = register
sys.modules["turbogr_plugin.registration"] = stub
"""


def test_a_broken_plugin_is_a_warning_at_the_import_of_torchrec(hosts: Path) -> None:
    done = python(BROKEN + "import turbogr_plugin, torchrec\nprint(torchrec.READY)", hosts)
    assert (done.returncode, done.stdout.strip()) == (0, "True")
    assert "RuntimeWarning: turbogr_plugin has not adapted TorchRec" in done.stderr
    assert "this plugin is broken" in done.stderr


def test_a_broken_plugin_does_not_break_imports_where_warnings_are_errors(hosts: Path) -> None:
    code = BROKEN + "import turbogr_plugin, torchrec\nprint(torchrec.READY)"
    done = python(code, hosts, options=("-W", "error"))
    assert (done.returncode, done.stdout.strip()) == (0, "True")
    assert "this plugin is broken" in done.stderr


def test_a_hook_that_cannot_be_installed_is_a_warning_and_torch_imports() -> None:
    code = (
        "import sys\nfrom turbogr_plugin.backend import autoload\n"
        "class Odd(list):\n    def insert(self, *_):\n        raise RuntimeError('no more finders')\n"
        "sys.meta_path = Odd(f for f in sys.meta_path if not f.__module__.startswith('turbogr'))\n"
        "import torch\nprint(torch.ones(2).sum().item())\n"
    )
    done = python(code)
    assert (done.returncode, done.stdout.strip()) == (0, "2.0")
    assert "RuntimeWarning: turbogr_plugin will not adapt TorchRec: RuntimeError('no more finders')" in done.stderr


def test_refused_items_are_named_in_one_warning(hosts: Path) -> None:
    code = COUNTING.replace("refused=[]", "refused=[types.SimpleNamespace(name=n, reason=n * 3) for n in ('aa', 'bb')]")
    done = python(code + "import turbogr_plugin, torchrec", hosts)
    assert done.returncode == 0
    assert "turbogr_plugin has refused to adapt:\n  aa: aaaaaa\n  bb: bbbbbb\n" in done.stderr
