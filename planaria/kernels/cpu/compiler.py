"""Compiles the interpreter (program.py) to LLVM IR: a Python in which every value is a 64-bit integer.

What it takes: functions of ints that return an int or nothing; assignment, also of tuples; if, while, for over
range with a positive step; break, continue, return; arithmetic, comparisons, and / or / not, conditional
expressions; min and max; numbers of classes and modules by name (`layout.BIG`); fields of a row, where an argument is
annotated with its class (`row: LinearOp`, `row.x`: see fields.py); calls of one another, of the kernels (`native.tile`)
and of the primitives in native.py. Division is that of C: operands must not be negative. Anything else is a SyntaxError
naming the line.

It takes milliseconds, where Numba takes seconds for the same functions, and what it makes needs no runtime.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping

from planaria.kernels.cpu.emit import Function

ARITHMETIC = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.FloorDiv: "sdiv", ast.Mod: "srem", ast.LShift: "shl",
    ast.RShift: "ashr", ast.BitAnd: "and", ast.BitOr: "or", ast.BitXor: "xor",
}  # fmt: skip
COMPARISON = {
    ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "slt", ast.LtE: "sle", ast.Gt: "sgt", ast.GtE: "sge",
}  # fmt: skip


class Body(Function):
    """One function being compiled; its variables are stack slots that LLVM turns into registers."""

    def __init__(self, module: Module, node: ast.FunctionDef) -> None:
        super().__init__(module.symbol(node.name), [a.arg for a in node.args.args], "i64")
        self.module, self.node = module, node
        self.variables: dict[str, str] = {}
        self.open = True  # the current block has no terminator yet
        self.loops: list[tuple[str, str]] = []  # labels of continue and break
        # arguments that are addresses of numbers with names: the class that numbers them
        self.views = {a.arg: module.known(a.annotation) for a in node.args.args if module.known(a.annotation)}

    def text(self) -> str:
        for arg in self.args:
            self.put(arg, f"%{arg}")
        self.all(self.node.body)
        if self.open:
            self.do("ret i64 0")
        self.lines[1:1] = [f"  {slot} = alloca i64" for slot in self.variables.values()]
        # what takes time is in the kernels: inlining doubles the time that compiling takes, and gains nothing
        return self.defined("nounwind noinline optsize", "" if self.node.name == self.module.entry else "internal ")

    def error(self, node: ast.AST, what: str) -> SyntaxError:
        line = getattr(node, "lineno", "?")
        return SyntaxError(f"{self.node.name}, line {line}: {what} can't be compiled; see compiler.py")

    # lines
    def do(self, line: str) -> None:
        super().do(line)
        self.open = self.open and not line.startswith(("br ", "ret "))

    def start(self, label: str) -> None:
        super().start(label)
        self.open = True

    def branch(self, label: str) -> None:
        """Go on there, unless the block has ended."""
        if self.open:
            super().branch(label)

    def put(self, name: str, value: str) -> None:
        slot = self.variables.setdefault(name, f"%v.{name}")
        self.do(f"store i64 {value}, ptr {slot}")

    # statements
    def all(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            self.statement(statement)

    def statement(self, node: ast.stmt) -> None:
        if not self.open:  # after return, break, continue: unreachable, but must be in some block
            self.start(self.label())
        match node:
            case ast.Expr(value=ast.Constant()) | ast.Pass() | ast.AnnAssign(value=None):
                pass
            case ast.Expr(value=ast.Call() as call):
                self.call(call)
            case ast.Assign(targets=[target], value=value):
                self.assign(target, value)
            case ast.AugAssign(target=ast.Name(id=name), op=op, value=value):
                left = self.value(ast.Name(id=name, lineno=node.lineno))
                self.put(name, self.binary(node, op, left, self.value(value)))
            case ast.If():
                self.choose(node)
            case ast.While():
                self.repeat(node)
            case ast.For():
                self.count_up(node)
            case ast.Return(value=None):
                self.do("ret i64 0")
            case ast.Return(value=ast.expr() as value):
                self.do(f"ret i64 {self.value(value)}")
            case ast.Continue():
                self.branch(self.loops[-1][0])
            case ast.Break():
                self.branch(self.loops[-1][1])
            case _:
                raise self.error(node, type(node).__name__)

    def assign(self, target: ast.expr, value: ast.expr) -> None:
        match target, value:
            case ast.Name(id=name), _:
                self.put(name, self.value(value))
            case ast.Tuple(elts=targets), ast.Tuple(elts=values) if len(targets) == len(values):
                found = [self.value(v) for v in values]
                for one, result in zip(targets, found, strict=True):
                    if not isinstance(one, ast.Name):
                        raise self.error(one, "a target that is no name")
                    self.put(one.id, result)
            case _:
                raise self.error(target, "this assignment")

    def choose(self, node: ast.If) -> None:
        then, other, done = self.label(), self.label(), self.label()
        self.condition(node.test, then, other)
        self.start(then)
        self.all(node.body)
        self.branch(done)
        self.start(other)
        self.all(node.orelse)
        self.branch(done)
        self.start(done)

    def repeat(self, node: ast.While) -> None:
        head, body, done = self.label(), self.label(), self.label()
        self.branch(head)
        self.start(head)
        self.condition(node.test, body, done)
        self.start(body)
        self.loops.append((head, done))
        self.all(node.body)
        self.loops.pop()
        self.branch(head)
        self.start(done)

    def count_up(self, node: ast.For) -> None:
        match node.target, node.iter:
            case ast.Name(id=name), ast.Call(func=ast.Name(id="range"), args=args, keywords=[]):
                pass
            case _:
                raise self.error(node, "a loop over anything but range")
        begin = self.value(args[0]) if len(args) > 1 else "0"
        end = self.value(args[1] if len(args) > 1 else args[0])
        step = self.value(args[2]) if len(args) > 2 else "1"
        # as in Python the loop has its own counter; the name is set from it at each turn
        counter = f".{name}.{self.label()}"
        self.put(counter, begin)
        head, body, following, done = (self.label() for _ in range(4))
        self.branch(head)
        self.start(head)
        now = self.op(f"load i64, ptr {self.variables[counter]}")
        self.do(f"br i1 {self.op(f'icmp slt i64 {now}, {end}')}, label %{body}, label %{done}")
        self.start(body)
        self.put(name, now)
        self.loops.append((following, done))
        self.all(node.body)
        self.loops.pop()
        self.branch(following)
        self.start(following)
        self.put(counter, self.op(f"add i64 {now}, {step}"))
        self.branch(head)
        self.start(done)

    # expressions
    def condition(self, node: ast.expr, yes: str, no: str) -> None:
        """Branch to one of two labels; `and` and `or` stop early."""
        match node:
            case ast.BoolOp(op=op, values=values):
                for value in values[:-1]:
                    further = self.label()
                    if isinstance(op, ast.And):
                        self.condition(value, further, no)
                    else:
                        self.condition(value, yes, further)
                    self.start(further)
                self.condition(values[-1], yes, no)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                self.condition(operand, no, yes)
            case ast.Compare():
                self.do(f"br i1 {self.compare(node)}, label %{yes}, label %{no}")
            case _:
                truth = self.op(f"icmp ne i64 {self.value(node)}, 0")
                self.do(f"br i1 {truth}, label %{yes}, label %{no}")

    def compare(self, node: ast.Compare) -> str:
        left, result = self.value(node.left), ""
        for op, right_node in zip(node.ops, node.comparators, strict=True):
            if type(op) not in COMPARISON:
                raise self.error(node, type(op).__name__)
            right = self.value(right_node)
            one = self.op(f"icmp {COMPARISON[type(op)]} i64 {left}, {right}")
            result = self.op(f"and i1 {result}, {one}") if result else one
            left = right
        return result

    def binary(self, node: ast.AST, op: ast.operator, left: str, right: str) -> str:
        if type(op) not in ARITHMETIC:
            raise self.error(node, type(op).__name__)
        return self.op(f"{ARITHMETIC[type(op)]} i64 {left}, {right}")

    def value(self, node: ast.expr) -> str:
        match node:
            case ast.Constant(value=int(number)):
                return str(int(number))
            case ast.Name(id=name) if name in self.variables:
                return self.op(f"load i64, ptr {self.variables[name]}")
            case ast.Attribute(value=ast.Name(id=name) as owner, attr=field) if name in self.views:
                word = getattr(self.views[name], field, None)
                if not isinstance(word, int):
                    raise self.error(node, f"{field}, which is no field of {self.views[name]},")
                return PRIMITIVES["get"](self, [self.value(owner), str(word)])
            case ast.Name() | ast.Attribute() if isinstance(known := self.module.known(node), int):
                return str(int(known))
            case ast.BinOp(left=left, op=op, right=right):
                a = self.value(left)
                return self.binary(node, op, a, self.value(right))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self.op(f"sub i64 0, {self.value(operand)}")
            case ast.Compare():
                return self.op(f"zext i1 {self.compare(node)} to i64")
            case ast.IfExp(test=test, body=body, orelse=other):
                return self.conditional(test, body, other)
            case ast.Call():
                return self.call(node)
            case ast.Name(id=name):
                raise self.error(node, f"the unknown name {name}")
            case _:
                raise self.error(node, type(node).__name__)

    def conditional(self, test: ast.expr, body: ast.expr, other: ast.expr) -> str:
        yes, no, done = self.label(), self.label(), self.label()
        name = f".if.{self.label()}"
        self.condition(test, yes, no)
        for label, node in ((yes, body), (no, other)):
            self.start(label)
            self.put(name, self.value(node))
            self.branch(done)
        self.start(done)
        return self.op(f"load i64, ptr {self.variables[name]}")

    def call(self, node: ast.Call) -> str:
        match node.func:
            case ast.Name(id=name) if not node.keywords:
                pass
            case ast.Attribute(value=ast.Name(id="native"), attr=kernel) if not node.keywords:
                name = f"pl_{kernel}"
            case _:
                raise self.error(node, "this call")
        args = [self.value(a) for a in node.args]
        passed = ", ".join(f"i64 {a}" for a in args)
        if name in ("min", "max") and len(args) == 2:
            return self.op(f"call i64 @llvm.s{name}.i64({passed})")
        if name in PRIMITIVES:
            return PRIMITIVES[name](self, args)
        kernels = self.module.kernels
        if name in kernels:
            returns, count = kernels[name]
            if len(args) != count:
                raise self.error(node, f"{name} with {len(args)} arguments instead of {count}")
            if returns == "void":
                self.do(f"call void @{name}({passed})")
                return "0"
            return self.op(f"call i64 @{name}({passed})")
        if name not in self.module.arity:
            raise self.error(node, f"a call of the unknown {name}")
        if len(args) != self.module.arity[name]:
            raise self.error(node, f"{name} with {len(args)} arguments")
        return self.op(f"call i64 @{self.module.symbol(name)}({passed})")

    def place(self, address: str, index: str, kind: str) -> str:
        return self.op(f"getelementptr {kind}, ptr {self.ptr(address)}, i64 {index}")


class Module:
    """The functions of one source text. kernels: name -> (return type, number of arguments), defined elsewhere."""

    def __init__(
        self,
        source: str,
        constants: Mapping[str, object],
        kernels: Mapping[str, tuple[str, int]],
        entry: str,
        symbol: str,
    ) -> None:
        self.functions = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef)]
        self.arity = {f.name: len(f.args.args) for f in self.functions}
        self.constants = constants
        self.kernels, self.entry, self._entry_symbol = kernels, entry, symbol

    def known(self, node: ast.expr | None) -> object:
        """The constant, class or module that a name, or a name in one of these, stands for, or None."""
        match node:
            case ast.Name(id=name):
                return self.constants.get(name)
            case ast.Attribute(value=owner, attr=name):
                return getattr(self.known(owner), name, None)
        return None

    def symbol(self, name: str) -> str:
        return self._entry_symbol if name == self.entry else f"program.{name}"

    def text(self) -> str:
        """The IR of all functions. Declarations of kernels are left out: they are in the same text."""
        return DECLARED + "\n".join(Body(self, f).text() for f in self.functions)


DECLARED = """
declare i64 @llvm.smin.i64(i64, i64)
declare i64 @llvm.smax.i64(i64, i64)
declare i64 @syscall(i64, i64, i64, i64, i64, i64, i64) nounwind
"""


def _shown(line: Callable[[Body, list[str]], str]) -> Callable[[Body, list[str]], str]:
    """Of a primitive that gives nothing: its line."""

    def primitive(body: Body, args: list[str]) -> str:
        body.do(line(body, args))
        return "0"

    return primitive


def _get32(body: Body, args: list[str]) -> str:
    place = body.place(args[0], args[1], "i32")
    return body.op(f"sext i32 {body.op(f'load i32, ptr {place}, align 4')} to i64")


def _put32(body: Body, args: list[str]) -> str:
    low = body.op(f"trunc i64 {args[2]} to i32")
    return f"store i32 {low}, ptr {body.place(args[0], args[1], 'i32')}, align 4"


def _atomic_put(body: Body, args: list[str]) -> str:
    body.op(f"atomicrmw xchg ptr {body.place(args[0], args[1], 'i64')}, i64 {args[2]} seq_cst")
    return "0"


PRIMITIVES: dict[str, Callable[[Body, list[str]], str]] = {
    "get": lambda body, a: body.op(f"load i64, ptr {body.place(a[0], a[1], 'i64')}, align 8"),
    "put": _shown(lambda body, a: f"store i64 {a[2]}, ptr {body.place(a[0], a[1], 'i64')}, align 8"),
    "get32": _get32,
    "put32": _shown(_put32),
    "atomic_get": lambda body, a: body.op(f"load atomic i64, ptr {body.place(a[0], a[1], 'i64')} seq_cst, align 8"),
    "atomic_put": _atomic_put,
    "atomic_add": lambda body, a: body.op(f"atomicrmw add ptr {body.place(a[0], a[1], 'i64')}, i64 {a[2]} seq_cst"),
    "prefetch": _shown(
        lambda body, a: f"call void @llvm.prefetch.p0(ptr {body.place(a[0], '0', 'i8')}, i32 0, i32 2, i32 1)"
    ),
    "syscall": lambda body, a: body.op(f"call i64 @syscall({', '.join(f'i64 {x}' for x in a)})"),
    "invoke": _shown(lambda body, a: f"call void {body.ptr(a[0])}({', '.join(f'i64 {x}' for x in a[1:])})"),
    "relax": _shown(lambda body, a: "call void @pl_relax()"),
}
