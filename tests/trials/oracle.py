# oracle eviction: keep M by the attention (in the full-cache model) that future segments will give, with decay over horizon; per head. Frozen base.
import sys; sys.argv=['lab','--untrained','--name','o','--docs','40','--threads','2']+sys.argv[1:]
src=open('lab.py').read().split("evals=args.evals")[0]; exec(src)
M,T,L=args.mem,args.seg,args.seq
import model as MD
nl=model.config.n_layers
class Rec(KVCache):
    def attend(s,layer,q,k,v):
        o=super().attend(layer,q,k,v)
        A=(q@k.transpose(-1,-2)/k.shape[-1]**.5).masked_fill(torch.ones(q.shape[2],k.shape[2],dtype=torch.bool).triu(1),-torch.inf).softmax(-1)
        nseg=-(-q.shape[2]//T)
        s.rec[layer]=torch.stack([a_.sum(2) for a_ in A.split(T,2)],2) # B,H,nseg,S
        return o
class Orc(KVCache):
    def attend(s,layer,q,k,v):
        # full kv held with ids; original positions
        if s.keys[layer] is not None and s.keys[layer].shape[2]+q.shape[2]>M+T:
            n=s.seg; fut=s.rec[layer][:,:,n:]
            if s.h: fut=fut[:,:,:s.h]
            fut=fut.sum(2) # B,H,S
            ids=s.ids[layer]; sc=fut.gather(2,ids)
            top=sc.topk(M,-1).indices.sort(-1).values
            s.keys[layer]=take(s.keys[layer],top); s.values[layer]=take(s.values[layer],top); s.ids[layer]=ids.gather(2,top)
        B,H=q.shape[:2]
        new=torch.arange(s.seen-q.shape[2],s.seen).expand(B,H,-1)
        s.ids[layer]=new if s.ids[layer] is None else torch.cat((s.ids[layer],new),2)
        o=super().attend(layer,q,k,v)
        if layer==nl-1: s.seg+=1
        return o
@torch.no_grad()
def go(h):
    tot=0;n=0
    for b in scored_batches(corpus,'mych',L,'cpu',args.docs,8):
        x=b[:,:-1]; r=Rec(nl); r.rec=[None]*nl; model(x,r)
        c=Orc(nl); c.rec=r.rec; c.ids=[None]*nl; c.seg=0; c.h=h
        for xs,y in zip(x.split(T,1),b[:,1:].split(T,1)):
            tot+=F.cross_entropy(model(xs,c).transpose(1,2),y,reduction='sum').item(); n+=y.numel()
    return tot/n
@torch.no_grad()
def win(mode):
    w=LoCoCo(model,Settings.of('streaming',M,T,L,4,positions='slots',lora_rank=0)); c=w.cache if mode else (lambda:KVCache(nl))
    tot=0;n=0
    for b in scored_batches(corpus,'mych',L,'cpu',args.docs,8):
        cc=c()
        for xs,y in zip(b[:,:-1].split(T,1),b[:,1:].split(T,1)):
            tot+=F.cross_entropy(model(xs,cc).transpose(1,2),y,reduction='sum').item(); n+=y.numel()
    w.remove(); return tot/n
print(M,T,L,'win',win(1),'full',win(0),'oracle all future',go(0),'next seg',go(1),'next 4',go(4),flush=True)
