//! Policies that change while gateways and regions run: a hub with the tables of the test, a real gateway, and a real
//! ingress.

mod age;
mod edge;
mod ingress;
mod tenants;
