//! Policies that change while gateways and regions run: a hub with tables that the test writes, a real edge, and a real door.

mod age;
mod edge;
mod ingress;
mod tenants;
