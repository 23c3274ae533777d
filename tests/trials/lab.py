import sys, torch, time, json, argparse, math; sys.path.insert(0,str(__import__('pathlib').Path(__file__).resolve().parents[2]))
import numpy as np, torch.nn.functional as F
from pathlib import Path
import eval_ppl
from eval_ppl import *
import lococo as LC
from lococo import *
from model import *
from train import Sequences
torch.set_flush_denormal(True)
p=argparse.ArgumentParser(); a=p.add_argument
a('--name',default='x'); a('--method',default='lococo'); a('--mem',type=int,default=64); a('--seg',type=int,default=64); a('--seq',type=int,default=1024)
a('--sinks',type=int,default=4); a('--heavy',type=int); a('--recent',type=int); a('--positions',default='slots'); a('--norm',default='softmax')
a('--gens',type=int,default=1); a('--blocks',type=int,default=1); a('--lr',type=float,default=1e-3); a('--conv-lr',type=float,default=5e-3)
a('--steps',type=int,default=100); a('--batch',type=int,default=8); a('--seed',type=int,default=0); a('--kernel',type=int,default=21); a('--rank',type=int,default=0)
a('--init',type=float,default=1.0); a('--threads',type=int,default=1); a('--bptt',type=int,default=1); a('--distill',type=float,default=0.); a('--logcount',type=int,default=0)
a('--docs',type=int,default=120); a('--score',default='sum'); a('--relu',type=int,default=1); a('--untrained',action='store_true'); a('--model',default='tiny')
a('--evals',type=int,nargs='*',default=[]); a('--hard',type=int,default=0); a('--wd',type=float,default=0.); a('--poskeys',type=int,default=0); a('--blend',type=float); a('--gain',type=int,default=0)
a('--drop',type=int,default=0); a('--scale',type=float,default=0.); a('--full',action='store_true'); a('--evalevery',type=int,default=0); a('--warm',type=int,default=10); a('--save')
args=p.parse_args(); torch.set_num_threads(args.threads); torch.manual_seed(args.seed)
PARTS['mych']=(2,18,19); PARTS['mytr']=tuple(range(3,18))
tok=Tokenizer(Path(args.model)); model=Llama.from_pretrained(args.model); corpus=Corpus([],tok)

class Comp(nn.Module):
    def __init__(s, D, g, kernel):
        super().__init__(); s.f=g//args.blocks; s.blocks=args.blocks
        s.conv=nn.Conv1d(2*D, s.f, kernel, padding=kernel//2); nn.init.normal_(s.conv.weight, std=args.init); nn.init.zeros_(s.conv.bias)
        s.gain=nn.Parameter(torch.zeros(g,1)) if args.gain else None
        s.gate=nn.Parameter(torch.tensor(args.blend)) if args.blend is not None else None
    def forward(s,k,v,score=None):
        B,G,S,D=k.shape; x=torch.cat((k,v),-1).flatten(0,1).transpose(1,2)
        l=s.conv(x).float()
        if args.relu: l=F.relu(l)
        l=l.view(B,G,s.f,S)
        if s.blocks>1: # entry i belongs to block floor(i*b/S)
            b=(torch.arange(S)*s.blocks)//S
            m=torch.arange(s.blocks)[:,None]==b[None]           # (b,S)
            l=l[:,:,None].masked_fill(~m[:,None],-torch.inf).flatten(2,3)  # (B,G,b*f,S)
        if args.norm=='softmax': w=l.softmax(-1)
        else: w=l+1e-9; w=w/w.sum(-1,keepdim=True)
        if args.hard: 
            h=F.one_hot(w.argmax(-1),S).float(); w=h+w-w.detach()
        if s.gate is not None:
            best=score.topk(w.shape[2],-1).indices.sort(-1).values; w=(1-s.gate)*F.one_hot(best,S)+s.gate*w
        return w

class GMem(Memory):
    def __init__(s,*a_):
        super().__init__(*a_); n=s.config.n_layers; s.count=[None]*n
    def compress(self, layer, k, v):
        s=self.settings; S=k.shape[2]; n=args.gens; g=s.merged//n; keepm=s.merged-g
        kept=s.sinks+s.heavy
        place=torch.arange(S); score=None
        scores=self.scores[layer]; cnt=self.count[layer]
        if cnt is None: cnt=torch.ones(*k.shape[:3])
        if cnt.shape[2]<S: cnt=torch.cat((cnt,torch.ones(*k.shape[:2],S-cnt.shape[2])),2)
        if s.scored:
            place=self.heavy_first(layer); k,v,scores=(take(x,place) for x in (k,v,scores)); cnt=cnt.gather(2,place)
        # parts: kept | oldest g | keepm | leaving | recent
        i0,i1,i2,i3=kept,kept+g,kept+s.merged,S-s.recent
        slot=torch.arange(s.mem)
        if s.positions=='slots':
            zero=place.new_zeros
            tgt=torch.cat((slot[:kept], torch.full((g,),0), slot[kept:kept+keepm], torch.zeros(i3-i2,dtype=torch.long), slot[s.mem-s.recent:]))
            if args.poskeys: # convolution sees keys at relative places
                tgt[i2:i3]=torch.arange(i3-i2)-(i3-i2)
            k=self.turn(k,tgt-place)
        def parts(x): return x[:,:,:i0],(x[:,:,i2:i3] if args.drop else torch.cat((x[:,:,i0:i1],x[:,:,i2:i3]),2)),x[:,:,i1:i2],x[:,:,i3:]
        kk,kr,km,kl=parts(k); vk,vr,vm,vl=parts(v); ck,cr,cm,cl=parts(cnt)
        if s.scored: score=ranking(parts(scores)[1],s.score)
        w=self.compressors[layer](kr,vr,score).type_as(v)
        if args.poskeys and s.positions=='slots':
            kr=self.turn(kr,-(tgt[i2:i3] if args.drop else torch.cat((torch.zeros(g,dtype=torch.long),tgt[i2:i3]))))
        kn,vn=w@kr,w@vr
        if self.compressors[layer].gain is not None: kn=kn*self.compressors[layer].gain.exp()
        if s.positions=='slots': kn=self.turn(kn,slot[kept+keepm:kept+s.merged])
        if args.logcount==1: nc=(w.detach()*cr[:,:,None]).sum(-1)*0+ torch.exp(-(w*(w+1e-9).log()).sum(-1))   # effective number
        elif args.logcount==2: 
            share=w/(w.sum(2,keepdim=True)+1e-6); nc=(share*cr[:,:,None]).sum(-1).clamp(min=1)
        else: nc=torch.ones(*kn.shape[:3])
        self.count[layer]=torch.cat((ck,cm,nc,cl),2)
        if s.scored:
            a_,b_,c_,d_=parts(scores); self.scores[layer]=torch.cat((a_,c_,w.detach().float()@b_,d_),2)
        return torch.cat((kk,km,kn,kl),2),torch.cat((vk,vm,vn,vl),2)
    def attend(self, layer, q,k,v):
        if not args.logcount: return super().attend(layer,q,k,v)
        k,v=self.update(layer,k,v); T,S=q.shape[2],k.shape[2]
        mask=torch.zeros(T,S).masked_fill(torch.ones(T,S,dtype=torch.bool).triu(S-T+1),-torch.inf)[None,None]
        if self.count[layer] is not None:
            c=self.count[layer]
            if c.shape[2]<S: c=self.count[layer]=torch.cat((c,torch.ones(*c.shape[:2],S-c.shape[2])),2)
            mask=mask+c.log()[:,:,None]
        return F.scaled_dot_product_attention(q,k,v,attn_mask=mask)
    def detach(self):
        super().detach(); self.count=[c if c is None else c.detach() for c in self.count]

def losses(tokens,cache,teach=None):
    pairs=list(zip(tokens[:,:-1].split(args.seg,1),tokens[:,1:].split(args.seg,1))); t0=0
    for n in range(0,len(pairs),args.bptt):
        tot=0; rep=0
        for x,y in pairs[n:n+args.bptt]:
            lg=model(x,cache); ce=F.cross_entropy(lg.flatten(0,1),y.flatten(),reduction='sum'); rep+=ce.item()
            if teach is not None:
                tp=teach[:,t0:t0+x.shape[1]]; kl=F.kl_div(lg.log_softmax(-1),tp,log_target=True,reduction='sum')
                tot=tot+args.distill*kl+(1-args.distill)*ce
            else: tot=tot+ce
            t0+=x.shape[1]
        yield tot,rep
        cache.detach()
@torch.no_grad()
def score(new,L,scale=None):
    out=[]
    for b in scored_batches(corpus,'mych',L,'cpu',args.docs,8):
        c=new(); t=0; tot=torch.zeros(len(b))
        pairs=zip(b[:,:-1].split(args.seg,1),b[:,1:].split(args.seg,1))
        for x,y in pairs:
            lg=model(x,c); tot+=F.cross_entropy(lg.transpose(1,2),y,reduction='none').sum(1)
        out+=(tot/(L-1)).tolist()
    return np.array(out)
evals=args.evals or [args.seq]
tag=f'{Path(args.model).name}-{args.mem}-{args.seg}'
base={}
for L in evals:
    f=Path(f'tests/trials/win-{tag}-{L}-{args.docs}.npy')
    if not f.exists():
        w=LoCoCo(model,Settings.of('streaming',args.mem,args.seg,max(L,args.seg),4,positions='slots',lora_rank=0)); np.save(f,score(w.cache,L)); w.remove()
    base[L]=np.load(f)
s=Settings.of(args.method,args.mem,args.seg,args.seq,args.sinks if args.method not in('full','longlora') else None,args.heavy,args.recent,args.positions if args.method not in('full',) else None,args.kernel,args.norm,None,args.score,args.rank)
l=LoCoCo(model,s)
if args.scale: model.config=LC.replace(model.config,rope_scale=args.scale)
torch.manual_seed(args.seed+1)
if s.merged:
    l.compressors=nn.ModuleList(Comp(model.config.head_dim,s.merged//args.gens,args.kernel) for _ in range(model.config.n_layers))
    l.cache=lambda: GMem(model.config,s,l.compressors)
l.start_training()
def rep(t):
    for L in evals:
        r=score(l.cache,L); d=r-base[L]; np.save(f'tests/trials/res-{args.name}-{t}-{L}.npy',r)
        print(f'{args.name} {t} L{L} docs {len(r)} win {base[L].mean():.4f} this {r.mean():.4f} diff {d.mean():+.4f} se {d.std()/len(d)**.5:.4f}',flush=True)
if args.untrained: rep('untrained'); sys.exit()
rep('before')
named=l.groups(); groups=[{"params":list(t.values()),"lr":args.conv_lr if g=="compressors" else args.lr} for g,t in named.items()]
opt=torch.optim.AdamW(groups,weight_decay=args.wd); sch=torch.optim.lr_scheduler.LambdaLR(opt,lambda i:min((i+1)/args.warm,(args.steps-i)/(args.steps-args.warm)))
P=[p for g in named.values() for p in g.values()]
data=Sequences(corpus,corpus.part('mytr'),args.seq,args.seed)
scored=args.batch*(args.seq-1); t=time.time(); run=[]
for step in range(args.steps):
    x=torch.from_numpy(np.stack([data[step*args.batch+i] for i in range(args.batch)])); tot=0; teach=None
    if args.distill:
        with torch.no_grad(): teach=model(x[:,:-1]).log_softmax(-1)
    for loss,r in losses(x,l.cache(),teach):
        if torch.is_tensor(loss) and loss.requires_grad: (loss/scored).backward()
        tot+=r
    torch.nn.utils.clip_grad_norm_(P,1.0); opt.step(); opt.zero_grad(); sch.step(); run.append(tot/scored)
    if (step+1)%25==0: print(args.name,step+1,f'{np.mean(run[-25:]):.4f} {(step+1)*scored/(time.time()-t):.0f} tok/s',flush=True)
    if args.evalevery and (step+1)%args.evalevery==0 and step+1<args.steps: rep(f's{step+1}')
rep('after')
if args.save: torch.save({n:p.detach() for g in l.groups().values() for n,p in g.items()},args.save)
