"""The process that renders templates: kept, replaced, interrupted, forked, and ended with its parent."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jinja2.filters
import pytest

from enginewright.runtime.shared.errors import BundleError, EnginewrightError, RequestError
from enginewright.runtime.text import chat_template, template_process
from enginewright.runtime.text.chat_template import ChatTemplate
from enginewright.runtime.text.template_process import TemplateProcess
from tests.waiting import HANG, wait_until

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
SCRIPT = """
import os, sys
from enginewright.runtime.text import chat_template
from enginewright.runtime.text.template_process import TemplateProcess
process = chat_template.template_process = TemplateProcess(cpu_seconds=60)
template = chat_template.ChatTemplate(sys.argv[1], {})
print(process._child._pid, flush=True)
template.render([{"role": "user"}])
"""


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[TemplateProcess]:
    renderer = TemplateProcess(cpu_seconds=0.5)
    monkeypatch.setattr(template_process, "SECONDS", HANG)  # only processor time counts, however busy the machine
    monkeypatch.setattr(chat_template, "template_process", renderer)
    yield renderer
    if renderer._child is not None:
        renderer._child.kill()


def render(source: str, **variables: object) -> str:
    return ChatTemplate(source, {}).render([{"role": "user", "content": "x"}], **variables)


def pid(process: TemplateProcess) -> int:
    assert process._child is not None
    return process._child._pid


def is_there(number: int) -> bool:
    """Returns True if a process that isn't a child of ours runs."""
    try:
        return ") Z " not in Path(f"/proc/{number}/stat").read_text()
    except FileNotFoundError:
        return False


def test_it_is_kept(process: TemplateProcess) -> None:
    assert render("a") == "a"
    first = pid(process)
    with pytest.raises(RequestError, match="line 1"):
        render("{{ a.b }}")
    with pytest.raises(BundleError, match="line 1"):
        render("{% if %}")
    assert [render(f"{{{{ {i} }}}}") for i in range(40)] == [str(i) for i in range(40)] and pid(process) == first


def test_one_that_was_stopped_or_took_much_memory_or_was_killed_is_replaced(process: TemplateProcess) -> None:
    with pytest.raises(RequestError, match=r"was stopped \(.*\): it took more than 0.5 seconds of processor time"):
        render(ENDLESS)
    assert process._child is None
    assert len(render("{{ x }}", x="x" * 25_000_000)) == 25_000_000
    assert process._child is None
    assert render("a") == "a"
    os.kill(pid(process), signal.SIGKILL)
    wait_until(lambda: not is_there(pid(process)))
    assert render("b") == "b"


def test_what_one_gives_back(process: TemplateProcess) -> None:
    """Values go there and texts come back as they are."""
    variables = {"a": (1, 2.5, None), 3: [True, "é\ud800"], None: float("inf")}
    assert render("{{ x }}{{ y }}", x=variables, y="\ud800\U0001f600") == f"{variables}\ud800\U0001f600"
    long = "wörd " * 200_000
    assert render("{{ x }}", x=long) == long


def test_every_filter_works_where_no_file_can_be_opened(process: TemplateProcess) -> None:
    for name in jinja2.filters.FILTERS:
        problem = ""
        try:
            render(f"{{{{ 'ab' | {name} }}}}{{{{ [['a', 'b']] | {name} | list }}}}")
        except EnginewrightError as e:
            problem = e.message.partition("): ")[2]
        assert not re.search("file|module|import|died", problem), (name, problem)
    assert render("{{ 'é'.encode('utf-16') | length }}{{ strftime_now('%Y')[:2] }}{{ [1] | pprint }}") == "420[1]"


def test_limits(process: TemplateProcess) -> None:
    render("a")
    limits = dict(re.findall(r"^(Max .+?)  +(\d+)", Path(f"/proc/{pid(process)}/limits").read_text(), re.MULTILINE))
    assert int(limits["Max open files"]) <= 4
    assert limits["Max file size"] == limits["Max core file size"] == "0"
    assert (256 << 20) < int(limits["Max address space"]) < (512 << 20)


def test_time_and_length(process: TemplateProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "MOST_BYTES", 1000)
    assert len(render("{{ 'x' * 999 }}")) == 999
    with pytest.raises(RequestError, match="its text is longer"):
        render("{{ x * 1000 }}", x="x")
    monkeypatch.setattr(template_process, "SECONDS", 0.05)
    with pytest.raises(RequestError, match=r"it took more than 0.05 seconds$|it took more than 0.05 seconds\n"):
        render(ENDLESS)


def test_threads(process: TemplateProcess) -> None:
    texts: list[str] = []

    def work(i: int) -> None:
        for _ in range(20):
            texts.append(render("{{ i }}", i=i))
            if i == 0:
                with pytest.raises(RequestError):
                    render("{{ raise_exception('no') }}")

    threads = [threading.Thread(target=work, args=[i]) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(texts) == sorted([str(i) for i in range(4)] * 20)


def test_a_forked_child_has_one_of_its_own(process: TemplateProcess) -> None:
    code = """
import os, sys, threading, time
from enginewright.runtime.shared.errors import RequestError
from enginewright.runtime.text import chat_template
from enginewright.runtime.text.chat_template import ChatTemplate
from enginewright.runtime.text.template_process import TemplateProcess

def endless():
    try: ChatTemplate(sys.argv[1], {}).render([{"role": "user"}])
    except RequestError as e: print("stopped", flush=True)

process = chat_template.template_process = TemplateProcess(cpu_seconds=0.5)
template = ChatTemplate("{{ messages[0].role }}", {})
parents = process._child._pid
thread = threading.Thread(target=endless); thread.start()
while thread.is_alive() and not process._busy: time.sleep(0.001)  # the other thread is to hold it
if os.fork() == 0:
    assert template.render([{"role": "child"}]) == "child" and process._child._pid != parents
    os._exit(0)
assert os.wait()[1] == 0
thread.join()
print(template.render([{"role": "parent"}]))
"""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code, ENDLESS],
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "stopped\nparent\n", "")


@pytest.mark.parametrize("send", [signal.SIGINT, signal.SIGKILL])
def test_it_ends_with_the_render_or_the_parent(send: signal.Signals) -> None:
    """Ctrl-C interrupts a render at once. What a killed parent leaves ends by its limit, or when it would reply."""
    script = SCRIPT.replace("cpu_seconds=60", "cpu_seconds=0.5") if send == signal.SIGKILL else SCRIPT
    parent = subprocess.Popen([sys.executable, "-c", script, ENDLESS], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    time.sleep(0.1)  # it renders by now, or ends before it does: both are right
    parent.send_signal(send)
    _, err = parent.communicate(timeout=HANG)
    assert parent.returncode == -send
    assert (b"KeyboardInterrupt" in err) == (send == signal.SIGINT)
    wait_until(lambda: not is_there(child))


def test_one_that_idles_ends_with_the_parent() -> None:
    ran = subprocess.run([sys.executable, "-c", SCRIPT, "a"], capture_output=True, text=True, timeout=HANG, check=True)
    wait_until(lambda: not is_there(int(ran.stdout)))


@pytest.mark.parametrize("executable", ["/nowhere/python", "", None, "/bin/false", "/bin/cat"])
def test_where_none_can_be_started(
    executable: str | None, process: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    process.start()  # doesn't say so yet
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(
        EnginewrightError, match=r"the process that renders chat templates can't be started: ."
    ) as caught:
        render("a")
    assert "import jinja2" in str(caught.value) and process._child is None
    assert len(os.listdir("/proc/self/fd")) <= before


def test_it_may_be_started_early(process: TemplateProcess) -> None:
    process.start()
    first = pid(process)
    process.start()
    assert render("a") == "a" and pid(process) == first


def test_a_signal_handler_may_render_too(process: TemplateProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """It interrupts the thread that asks, anywhere: here before the request is written."""
    exchange, rendered = template_process._Child.exchange, list[str]()

    def interrupted(child: template_process._Child, request: bytes) -> tuple[str, str]:
        if not rendered:
            rendered.append("")
            rendered[0] = render("inner {{ messages[0].content }}")  # as a handler in this thread would
        return exchange(child, request)

    monkeypatch.setattr(template_process._Child, "exchange", interrupted)
    asking = threading.Thread(target=lambda: rendered.append(render("outer {{ messages[0].content }}")), daemon=True)
    asking.start()
    asking.join(HANG)
    assert rendered == ["inner x", "outer x"]
    assert render("{{ messages[0].role }}") == "user" and process._child is not None
