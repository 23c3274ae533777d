import sys, os, time, json
import torch
torch.set_num_threads(1); torch.set_flush_denormal(True)
sys.path.insert(0,'.'); sys.path.insert(0,'./tests')
import reproduce as r, train
from eval_ppl import Corpus, evaluate, load_base, scored_batches
from lococo import LoCoCo
import math
from pathlib import Path
def run(name, flags, seq=2048, seed=0, steps=60, mem=128, frozen=False, docs=48):
    out=Path('./runs/x'+str(os.getpid())); out.mkdir(parents=True,exist_ok=True)
    sys.argv=['train.py',*map(str,["--device","cpu","--mem",mem,"--segment",mem,"--seq",seq,"--steps",steps,"--seed",seed,"--batch",8192//seq,"--micro-batch",8192//seq,"--out",out,*flags])]
    args=train.parse()
    if frozen: args.lora_rank=0
    model,tok=load_base(args); corpus=Corpus([],tok)
    lo=LoCoCo(model,train.settings_of(args)); lo.start_training()
    t=time.time()
    train.train(lo,train.Sequences(corpus,corpus.part("training"),seq,seed),args)
    res={}
    for n in ((seq,) if frozen else (2048,8192)):
        b=scored_batches(corpus,"choosing",n,"cpu",docs,8)
        row=evaluate(model,lambda length: lo,{n:b}) if False else None
        from eval_ppl import perplexity
        res[n]=round(math.log(perplexity(model,lo.cache,b,args.segment)),4)
    lo.remove()
    print(os.environ.get("TRIAL","now:0"),name,seq,seed,steps,'frozen' if frozen else '',res,round(time.time()-t),'s',flush=True)
if __name__=='__main__':
    sys.stderr=open(os.devnull,'w')
    for job in sys.argv[1].split(';'):
        trial,*flags=job.split()
        os.environ["TRIAL"]=trial
        seed=int(os.environ.get("SEED","1")); run(" ".join(flags),["--method","lococo" if "streaming" not in flags else "streaming",*[f for f in flags if f!="streaming"]],steps=100,seed=seed)
