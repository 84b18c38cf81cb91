import re,sys,subprocess
from pathlib import Path
g=open("/work/shared/design/GLOSSARY.md").read()
sec=g[g.index("## 3 Renames"):g.index("### Never rename")]
prefix={"scorekit":"scorekit","scorekit/server":"scorekit/server","services":"services","trainer: rl, runs, chat":"trainer","trainer: translation, roleplay, sft":"trainer","trainer/search":"trainer/search","synth":"synth","demo, bench, tools, tests":""}
out=[];members=[];missing=[]
for head,body in re.findall(r"### (.*?)\n```\n(.*?)```",sec,flags=re.S):
    pre=prefix[head]
    for line in body.strip().split("\n"):
        path,_,names=line.partition(":")
        old,_,new=[x.strip() for x in path.partition("→")]
        base=(pre+"/"+old if pre else old)
        m=base.strip("/").replace("/",".").removesuffix(".__init__")
        p=Path(base.strip("/"))
        if not (p.with_suffix(".py").exists() or (p/"__init__.py").exists() or p.is_dir()): missing.append(base); continue
        if new:
            n=new.strip("/")
            full=n.replace("/",".") if "/" in n else (m.rsplit(".",1)[0]+"."+n if "." in m else n)
            out.append(f"module {m} {full}")
        last=None
        for r in [x.strip() for x in names.split(",") if x.strip()]:
            a,_,b=[x.strip() for x in r.partition("→")]
            if a.startswith("."): members.append(f"{m}:{last}{a} {b}"); continue
            if "." in a: members.append(f"{m}:{a} {b}"); last=a.split(".")[0]; continue
            last=a
            out.append(f"name {m}.{a} {b}")
print("\n".join(out)); 
open("/tmp/members.txt","w").write("\n".join(members)); print("missing",missing,file=sys.stderr); print(len(out),len(members),file=sys.stderr)
