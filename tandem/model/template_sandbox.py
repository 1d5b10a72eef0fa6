"""Sandboxed Jinja for untrusted chat templates.

Access: Jinja's sandbox, restricted to the filters, methods and functions that chat templates need.
Time and memory: every operation is charged to the TemplateBudget of the run (template_budget.py). To do so, the syntax
tree is rewritten before it is compiled: loops, output, literals and comparisons pass through filters whose names no
template can write ("=loop", "=output" ...).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import datetime
from types import BuiltinMethodType, MethodType
from typing import Any, NoReturn

from jinja2 import nodes, pass_context
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from tandem.errors import RequestError, TemplateError
from tandem.model.template_budget import ADVICE, MAX_NUMBER, MAX_VALUE, TemplateBudget, check_cost, refuse

MAX_SOURCE = 128 << 10  # maximum characters of a template
MAX_NODES = (
    5_000  # of its syntax tree; those of models have 1,300 at most. Python compiles all without a break
)
BUDGET_NAME = "=budget"  # template variable that holds the TemplateBudget of a run

TEXT_METHODS = (
    "capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit islower isnumeric isspace "
    "istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition rsplit "
    "rstrip split splitlines startswith strip swapcase title upper"
)
METHODS = {str: TEXT_METHODS.split(), dict: ["get", "items", "keys", "values"]}
METHODS |= {list: ["count", "index"], tuple: ["count", "index"]}
TEXT_FILTERS = "capitalize e escape indent lower replace safe string title trim upper"
OTHER_FILTERS = (
    "abs count d default dictsort first float int items join last length list map max min reject rejectattr reverse "
    "select selectattr sort unique"
)


def guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a filter of Jinja: checks its arguments, and charges its result to the TemplateBudget."""
    wants, is_text = getattr(function, "jinja_pass_arg", None), name in TEXT_FILTERS.split()

    @pass_context
    def run(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs and name == "replace":
            refuse("names the arguments of 'replace'")
        budget, arguments = budget_of(context), [*args, *kwargs.values()]
        if is_text and not isinstance(value, str):
            value = budget.text(value)
        for argument in (value, *arguments):
            budget.weigh(argument)  # refuses values that are not plain data
        check_cost(name, value, arguments)
        given = {"context": context, "environment": context.environment, "eval_context": context.eval_ctx}
        first = [given[wants.name]] if wants else []
        return budget.charge(function(*first, value, *args, **kwargs))

    return run


def budget_of(context: Context) -> TemplateBudget:
    budget: TemplateBudget = context.parent[BUDGET_NAME]
    return budget


@pass_context
def to_json(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> Any:
    budget = budget_of(context)
    if indent is not None and not (
        isinstance(indent, int) and indent <= 16 and budget.weigh(value) < MAX_VALUE >> 4
    ):
        refuse("indents too much JSON too far")
    if separators is not None and any(len(separator) > 16 for separator in separators):
        refuse("separates JSON by too much")
    budget.weigh(value)
    options: dict[str, Any] = {"ensure_ascii": ensure_ascii, "indent": indent, "separators": separators}
    return budget.charge(json.dumps(value, sort_keys=sort_keys, **options))


@pass_context
def charge_output(context: Context, value: Any) -> str:
    return budget_of(context).text(value)


@pass_context
def charge_text(context: Context, values: tuple[Any, ...]) -> Any:
    budget = budget_of(context)
    return budget.charge("".join(map(budget.text, values)))


@pass_context
def charge_value(context: Context, value: Any) -> Any:
    return budget_of(context).charge(value)


@pass_context
def charge_step(context: Context, value: Any) -> Any:
    budget_of(context).spend()
    return value


@pass_context
def charge_key(context: Context, value: Any) -> Any:
    budget_of(context).spend(budget_of(context).weigh(value))  # an error may write it out
    return value


@pass_context
def charge_loop(context: Context, values: Any) -> Iterator[Any]:
    return budget_of(context).steps(values)


class ChargeBudget(NodeTransformer):
    """Wraps the operations of a template in filters that charge the TemplateBudget."""

    def _charged(self, node: nodes.Node, name: str) -> nodes.Filter:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [self._charged(child, "=output") for child in node.nodes]
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = self._charged(node.iter, "=loop")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._charged(nodes.Tuple(node.nodes, "load", lineno=node.lineno), "=text")

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = self._charged(node.expr, "=step")
        return node

    def visit_Test(self, node: nodes.Test) -> nodes.Node:
        self.generic_visit(node)
        node.node = self._charged(node.node, "=step")
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return self._charged(node, "=value")
        if not isinstance(node.arg, nodes.Const):
            node.arg = self._charged(node.arg, "=key")
        return node

    def visit_List(self, node: nodes.List | nodes.Tuple | nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        stored = isinstance(node, nodes.Tuple) and node.ctx != "load"
        constant = all(isinstance(item, nodes.Const) for item in node.items)
        return node if stored or constant else self._charged(node, "=value")

    visit_Tuple = visit_Dict = visit_List

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        self.generic_visit(node)
        node.filter = nodes.Filter(node.filter, "=value", [], [], None, None, lineno=node.lineno)
        return node

    def visit_NSRef(self, node: nodes.NSRef) -> nodes.Node:
        if node.attr.startswith("_"):
            refuse(f"sets {node.attr!r}")
        return node

    def visit_Include(self, node: nodes.Node) -> NoReturn:
        refuse(f"has the statement {type(node).__name__}")

    visit_Import = visit_FromImport = visit_Extends = visit_ScopedEvalContextModifier = visit_Include


class GenerationTag(Extension):
    """{% generation %} marks the assistant's text for training; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def bounded_range(*args: int) -> range:
    numbers = range(*args)
    if len(numbers) > 100_000 or any(abs(number) > 1 << 31 for number in args):
        refuse("counts too far")
    return numbers


def raise_exception(message: str) -> NoReturn:
    raise RequestError(f"the model's chat template does not take these messages: {message}")


def strftime_now(format: str) -> str:
    return datetime.now().strftime(format[:100])


def make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def make_namespace(*args: Any, **kwargs: Any) -> Namespace:
    values = dict(*args, **kwargs)
    if any(str(name).startswith("_") for name in values):
        refuse("hides names in a namespace")
    return Namespace(values)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "dict": make_dict,
    "namespace": make_namespace,
    "raise_exception": raise_exception,
    "range": bounded_range,
    "strftime_now": strftime_now,
}


class Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, LoopControlExtension],
            optimized=False,  # it would evaluate each part again for each part that it is in
        )
        self.globals = dict(FUNCTIONS)
        names = f"{TEXT_FILTERS} {OTHER_FILTERS}".split()
        self.filters = {name: guarded(name, FILTERS[name]) for name in names}
        self.filters |= {
            "tojson": to_json,
            "=output": charge_output,
            "=text": charge_text,
            "=value": charge_value,
        }
        self.filters |= {"=step": charge_step, "=key": charge_key, "=loop": charge_loop}

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if not super().is_safe_attribute(obj, attr, value):
            return False
        return isinstance(obj, Namespace | LoopContext | Macro) or any(
            isinstance(obj, kind) and attr in names for kind, names in METHODS.items()
        )

    def is_safe_callable(self, obj: Any) -> bool:
        if isinstance(obj, BuiltinMethodType):
            return self.is_safe_attribute(obj.__self__, obj.__name__, obj)
        if isinstance(obj, MethodType):
            return isinstance(obj.__self__, LoopContext)
        return isinstance(obj, Macro | LoopContext | Undefined) or obj in FUNCTIONS.values()

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = budget_of(__context)
        budget.spend()
        if not __self.is_safe_callable(__obj):
            refuse(f"calls a {type(__obj).__name__}")
        arguments = [*args, *kwargs.values()]
        if not isinstance(__obj, Macro | LoopContext):
            for argument in arguments:
                budget.weigh(argument)  # refuses values that are not plain data
        if isinstance(__obj, BuiltinMethodType) and isinstance(__obj.__self__, str):
            check_cost(__obj.__name__, __obj.__self__, arguments)
        result = super().call(__context, __obj, *args, **kwargs)
        return result if isinstance(result, Namespace) else budget.charge(result)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = budget_of(context)
        if operator == "%" and isinstance(left, str):
            refuse("formats text with %")
        if operator == "**" and not (
            abs(right) <= 60 and abs(left) <= 1 << 60 and abs(left) ** abs(right) < MAX_NUMBER
        ):
            refuse("computes a large power")
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                size = 4 * len(value) if isinstance(value, str) else budget.weigh(value)
                if isinstance(times, int) and not isinstance(value, int | float) and size * times > MAX_VALUE:
                    refuse("repeats a value too often")
        return budget.charge(super().call_binop(context, operator, left, right))


def _count_nodes(tree: nodes.Node) -> int:
    count, left = 0, [tree]
    while left:
        left.extend(left.pop().iter_child_nodes())
        count += 1
    return count


def compile_template(source: str) -> Callable[..., str]:
    """Returns a function that renders the template with given variables."""
    if len(source) > MAX_SOURCE:
        refuse(f"has {len(source)} characters")
    sandbox = Sandbox()
    try:
        tree = sandbox.parse(source)
        if (count := _count_nodes(tree)) > MAX_NODES:
            refuse(f"has {count} parts")
        code = sandbox.compile(ChargeBudget().visit(tree))
        template = sandbox.template_class.from_code(sandbox, code, sandbox.globals)
    except TemplateError:
        raise
    except Exception as error:
        raise TemplateError(f"the model's chat template is broken ({str(error)[:200]}): {ADVICE}") from None

    def render(**variables: Any) -> str:
        budget = TemplateBudget()
        try:
            if sum(map(budget.weigh, variables.values())) > MAX_VALUE:
                raise RequestError(f"the messages take more than {MAX_VALUE >> 20} MB: send less")
            return template.render({**variables, BUDGET_NAME: budget})
        except (TemplateError, RequestError):
            raise
        except Exception as error:
            raise TemplateError(f"the model's chat template failed ({str(error)[:200]}): {ADVICE}") from None

    return render
