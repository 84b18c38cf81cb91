"""python renamer.py TABLE: rename modules, classes, functions of a repo by qualified name (LibCST)."""
import sys, re, subprocess, collections, os
from pathlib import Path
import libcst as cst
from libcst.metadata import MetadataWrapper, QualifiedNameProvider, QualifiedNameSource, ParentNodeProvider
ROOT=Path.cwd()
files=[Path(f) for f in subprocess.run(["git","ls-files","*.py"],capture_output=True,text=True).stdout.split()]
def modname(f):
    p=list(f.with_suffix("").parts)
    if p[-1]=="__init__": p=p[:-1]
    return ".".join(p)
mods={modname(f):f for f in files}
# ---- table
moves={}; rules={}
for line in open(sys.argv[1]):
    line=line.split("#")[0].strip()
    if not line: continue
    kind,old,new=line.split()
    (moves if kind=="module" else rules)[old]=new
def moved(m):
    parts=m.split("."); out=[]
    for k in range(len(parts)):
        pre=".".join(parts[:k+1])
        out.append(moves[pre].rsplit(".",1)[-1] if pre in moves else parts[k])
    return ".".join(out)
# ---- reexports
exports={}
for m,f in mods.items():
    try: tree=cst.parse_module(f.read_text())
    except Exception as e: print(f,e); continue
    for st in tree.body:
        for s in getattr(st,"body",[]) if isinstance(st,cst.SimpleStatementLine) else []:
            if isinstance(s,cst.ImportFrom) and s.module and not isinstance(s.names,cst.ImportStar):
                src=cst.helpers.get_full_name_for_node(s.module) if hasattr(cst,'helpers') else None
                from libcst.helpers import get_full_name_for_node as g
                src=g(s.module)
                for a in s.names:
                    n=a.name.value; l=a.asname.name.value if a.asname else n
                    exports[f"{m}.{l}"]=f"{src}.{n}"
def resolve(q,depth=0):
    while q in exports and depth<6 and q not in rules: q=exports[q]; depth+=1
    return q
newname={}
def target(q):
    r=resolve(q)
    return rules.get(r)
for o in list(rules):
    m=o.rsplit(".",1)[0]
    if m not in mods: print("NO MODULE",o)
for o in moves:
    if o not in mods: print("NO MODULE",o)
def dotted(name):
    parts=name.split("."); n=cst.Name(parts[0])
    for p in parts[1:]: n=cst.Attribute(n,cst.Name(p))
    return n
class T(cst.CSTTransformer):
    METADATA_DEPENDENCIES=(QualifiedNameProvider,ParentNodeProvider)
    def __init__(s,mod): s.mod=mod; s.count=0; s.all=False
    def new_for(s,node):
        for q in s.get_metadata(QualifiedNameProvider,node,set()):
            if q.source is QualifiedNameSource.IMPORT:
                old=node.value if isinstance(node,cst.Name) else node.attr.value
                t=target(q.name)
                if t: return t if old==resolve(q.name).rsplit(".",1)[1] else None
                if q.name in moves: return moves[q.name].rsplit(".",1)[1] if old==q.name.rsplit(".",1)[1] else None
            elif q.source is QualifiedNameSource.LOCAL and "." not in q.name:
                t=rules.get(f"{s.mod}.{q.name}")
                if t: return t
        return None
    def leave_Name(s,o,u):
        p=s.get_metadata(ParentNodeProvider,o)
        if isinstance(p,cst.Attribute) and p.attr is o: return u
        if isinstance(p,cst.Arg) and p.keyword is o: return u
        if isinstance(p,cst.ImportAlias): return u
        if isinstance(p,(cst.FunctionDef,cst.ClassDef)) and p.name is o:
            qs=s.get_metadata(QualifiedNameProvider,p,set())
            for q in qs:
                t=rules.get(f"{s.mod}.{q.name}")
                if t: s.count+=1; return u.with_changes(value=t)
            return u
        t=s.new_for(o)
        if t and t!=u.value: s.count+=1; return u.with_changes(value=t)
        return u
    def leave_Attribute(s,o,u):
        t=s.new_for(o)
        if t and isinstance(u.attr,cst.Name) and u.attr.value!=t:
            # only where the whole attribute is the thing itself
            s.count+=1; return u.with_changes(attr=cst.Name(t))
        return u
    def visit_Import(s,node): return False
    def visit_ImportFrom(s,node): return False
    def leave_Import(s,o,u):
        names=[]; ch=False
        from libcst.helpers import get_full_name_for_node as g
        for a in u.names:
            f=g(a.name); m=moved(f)
            if m!=f: ch=True; a=a.with_changes(name=dotted(m))
            names.append(a)
        if ch: s.count+=1
        return u.with_changes(names=names)
    def leave_ImportFrom(s,o,u):
        from libcst.helpers import get_full_name_for_node as g
        if not u.module or isinstance(u.names,cst.ImportStar): return u
        src=g(u.module); names=[]; bysrc=collections.OrderedDict()
        newsrc=moved(src)
        for a in u.names:
            n=a.name.value; t=target(f"{src}.{n}"); 
            q=f"{src}.{n}"
            if q in moves:
                full=moved(q); parent,base=full.rsplit(".",1)
                a=a.with_changes(name=cst.Name(base)); bysrc.setdefault(parent,[]).append(a); s.count+=1; continue
            if t: a=a.with_changes(name=cst.Name(t)); s.count+=1
            bysrc.setdefault(newsrc,[]).append(a)
        if len(bysrc)==1:
            (k,names),=bysrc.items()
            if k!=src: s.count+=1; u=u.with_changes(module=dotted(k))
            return u.with_changes(names=names)
        print("SPLIT IMPORT by hand:",s.mod,src,list(bysrc)); return u
words=set(r.rsplit(".",1)[1] for r in rules)|set(m.rsplit(".",1)[1] for m in moves)
pat=re.compile(r"\b("+"|".join(map(re.escape,sorted(words)))+r")\b")
mods_of_rules=collections.defaultdict(set)
for r in rules: mods_of_rules[r.rsplit(".",1)[0]].add(r.rsplit(".",1)[1])
sources=collections.defaultdict(set)   # where a name can be imported from
for r in rules:
    sources[r].add(r.rsplit(".",1)[0])
for q in exports:
    r=resolve(q)
    if r in rules: sources[r].add(q.rsplit(".",1)[0])
def relevant(m,src):
    w=set(re.findall(r"\w+",src))
    for mv in moves:
        if mv.rsplit(".",1)[-1] in w and mv.split(".")[0] in w: 
            if mv in src or re.search(r"from "+re.escape(mv.rsplit(".",1)[0])+r" import [^\n]*(\([^)]*)?\b"+mv.rsplit(".",1)[1]+r"\b",src): return True
    for r,ss in sources.items():
        if r.rsplit(".",1)[1] in w:
            for x in ss:
                if x==m or x in src or (x.rsplit(".",1)[-1] in w and "from "+x.rsplit(".",1)[0]+" import" in src): return True
    return False
n=0
for m,f in mods.items():
    src=f.read_text()
    if not relevant(m,src): continue
    t=T(m)
    try: out=MetadataWrapper(cst.parse_module(src),unsafe_skip_copy=True).visit(t)
    except Exception as e: print("FAIL",f,e); continue
    if t.count: f.write_text(out.code); n+=1
print("python files changed",n)
# ---- file moves
for o,nw in sorted(moves.items(),key=lambda x:x[0].count("."),reverse=True):
    f=mods.get(o)
    if f is None: continue
    if f.name=="__init__.py":
        src=f.parent; dst=Path(*nw.split("."))
    else:
        src=f; dst=Path(*nw.split(".")).with_suffix(".py")
    dst.parent.mkdir(parents=True,exist_ok=True)
    subprocess.run(["git","mv",str(src),str(dst)],check=True)
# ---- text: dotted names and paths
texts=[Path(x) for x in subprocess.run(["git","ls-files"],capture_output=True,text=True).stdout.split("\n") if x and Path(x).suffix in (".py",".md",".toml",".yaml",".yml",".sh",".json",".ipynb",".html","") and Path(x).is_file()]
subs=[]
for o in moves:
    nw=moved(o)
    subs.append((o,re.compile(r"(?<![\w./])"+re.escape(o)+r"(?!\w)"),nw))
    po,pn=o.replace(".","/"),nw.replace(".","/")
    if "/" in po: subs.append((po,re.compile(r"(?<![\w])"+re.escape(po)+r"(?=\.py\b|/|`|\b(?!\.))"),pn))
for o,nw in rules.items():
    m,_=o.rsplit(".",1)
    subs.append((o,re.compile(r"(?<![\w.])"+re.escape(o)+r"\b"),f"{m}.{nw}"))
    if moved(m)!=m: subs.append((f"{moved(m)}.{o.rsplit('.',1)[1]}",re.compile(r"(?<![\w.])"+re.escape(f"{moved(m)}.{o.rsplit('.',1)[1]}")+r"\b"),f"{moved(m)}.{nw}"))
for f in texts:
    if f.name=="CHANGELOG.md": continue
    try: s=f.read_text()
    except UnicodeDecodeError: continue
    o=s
    for k,p,nw in subs:
        if k in s: s=p.sub(nw,s)
    if s!=o: f.write_text(s); print("text",f)
