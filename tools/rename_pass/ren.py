"""Rename names within functions, by scope, with LibCST.

    /tmp/cst/bin/python /tmp/brief/ren.py BATCH        (run in the root of your worktree)

BATCH: lines `path.py Qual.name old=new old2=new2 ...`; Qual.name is the function (Class.method,
outer.inner), or `*` for every function and class body of the file, or `self.Class` to rename the attributes
self.old -> self.new and field declarations of one class WITHIN THE FILE (other files: by hand; mypy tells).
Strings, attribute names after a dot and keyword names at call sites are not touched (except self. mode).
A new name that the function already uses is an error, and nothing in that file is changed.
"""
import sys, collections
import libcst as cst
from libcst.metadata import MetadataWrapper, ParentNodeProvider

class Names(cst.CSTVisitor):
    def __init__(self): self.names=set()
    def visit_Name(self,node): self.names.add(node.value)

class Rename(cst.CSTTransformer):
    METADATA_DEPENDENCIES=(ParentNodeProvider,)
    def __init__(self, rules): 
        self.rules=rules; self.stack=[]; self.done=collections.Counter(); self.errors=[]; self.active=[]
    def _enter(self,node):
        self.stack.append(node.name.value); q=".".join(self.stack)
        maps=[m for qual,m in self.rules if qual==q or qual=="*"]
        merged={}
        for m in maps: merged.update(m)
        if merged and not any(isinstance(m,dict) and m is not None and merged.items()<=m.items() for m in self.active):
            v=Names(); node.visit(v)
            for old,new in merged.items():
                if new in v.names and old in v.names: self.errors.append(f"{q}: {new} is used already")
        for qual in [qual for qual,_ in self.rules if qual==q]: self.done[qual]+=1
        self.active.append({**(self.active[-1] if self.active else {}), **merged})
    def visit_FunctionDef(self,node): self._enter(node)
    def visit_ClassDef(self,node): self._enter(node)
    def leave_FunctionDef(self,o,u): self.stack.pop(); self.active.pop(); return u
    def leave_ClassDef(self,o,u): self.stack.pop(); self.active.pop(); return u
    def leave_Name(self,o,u):
        if not self.active: return u
        new=self.active[-1].get(o.value)
        if new is None: return u
        parent=self.get_metadata(ParentNodeProvider,o)
        if isinstance(parent,cst.Attribute) and parent.attr is o: return u
        if isinstance(parent,cst.Arg) and parent.keyword is o: return u
        if isinstance(parent,(cst.FunctionDef,cst.ClassDef)) and parent.name is o: return u
        if isinstance(parent,cst.ImportAlias): return u
        return u.with_changes(value=new)

class Attr(cst.CSTTransformer):
    def __init__(self, cls, mapping): self.cls=cls; self.m=mapping; self.inside=0
    def visit_ClassDef(self,node): 
        if node.name.value==self.cls: self.inside+=1
    def leave_ClassDef(self,o,u):
        if o.name.value==self.cls: self.inside-=1
        return u
    def leave_Attribute(self,o,u):
        if self.inside and isinstance(o.value,cst.Name) and o.value.value=="self" and o.attr.value in self.m:
            return u.with_changes(attr=cst.Name(self.m[o.attr.value]))
        return u
    def leave_AnnAssign(self,o,u):
        if self.inside and isinstance(o.target,cst.Name) and o.target.value in self.m and not getattr(self,'fn',0):
            return u.with_changes(target=cst.Name(self.m[o.target.value]))
        return u

by=collections.defaultdict(list)
for line in open(sys.argv[1]):
    line=line.split("#")[0].strip()
    if not line: continue
    path,qual,*pairs=line.split()
    by[path].append((qual,dict(p.split("=") for p in pairs)))
bad=0
for path,rules in by.items():
    source=open(path).read()
    module=cst.parse_module(source)
    local=[(q,m) for q,m in rules if not q.startswith("self.")]
    t=Rename(local)
    out=MetadataWrapper(module).visit(t) if local else module
    for q,_ in local:
        if q!="*" and not t.done[q]: t.errors.append(f"no function {q}")
    if t.errors:
        bad=1
        for e in t.errors: print(f"{path}: {e}")
        continue
    for q,m in rules:
        if q.startswith("self."): out=out.visit(Attr(q[5:],m))
    open(path,"w").write(out.code)
    print(path,"ok")
sys.exit(bad)
