//! Laws that change while gateways and regions run: a hub with tables that the test writes, a real edge, and a real door.

#![expect(clippy::unwrap_used, reason = "what is not as expected fails the test, there")]

mod door;
mod edge;
