//! Requests that find no ready replica: at an ingress, and through a gateway before two regions. The replicas are
//! scripted and become ready on command; everything else is real.

mod edge;
mod failed;
mod fixture;
mod ingress;
