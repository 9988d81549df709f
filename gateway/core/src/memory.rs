//! Memory budget of request bodies: in total, for each tenant and for each connection.
//!
//! A body is counted as it arrives, never by its declared length: a declaration costs a client nothing. The limits of a
//! tenant and of a connection are parts of the total, so that the one that uses them up is rejected and others are not.

use std::collections::BTreeMap;
use std::net::SocketAddr;

/// Limits of the bytes of bodies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// All bodies together.
    pub total: usize,
    /// Bodies of one tenant.
    pub per_tenant: usize,
    /// Bodies received over one connection.
    pub per_connection: usize,
}

/// Owner of a body: tenant and connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BodyOwner {
    /// Index of the tenant; `None` if another process has counted it.
    pub tenant: Option<usize>,
    /// Client address of the connection; `None` if the connection carries the requests of many clients.
    pub connection: Option<SocketAddr>,
}

/// Limit that was reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BudgetExceeded {
    /// [`Limits::total`].
    Total,
    /// [`Limits::per_tenant`].
    Tenant,
    /// [`Limits::per_connection`].
    Connection,
}

/// Memory in use, by owner.
#[derive(Clone, Debug)]
pub struct Budget {
    limits: Limits,
    used: usize,
    tenants: BTreeMap<usize, usize>,
    connections: BTreeMap<SocketAddr, usize>,
}

impl Budget {
    /// Starts with no memory in use.
    pub fn new(limits: Limits) -> Budget {
        Budget { limits, used: 0, tenants: BTreeMap::new(), connections: BTreeMap::new() }
    }

    /// Returns the limits.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Returns the bytes in use.
    pub fn used(&self) -> usize {
        self.used
    }

    /// Returns the bytes of the tenant that uses the most.
    pub fn largest_tenant(&self) -> usize {
        self.tenants.values().copied().max().unwrap_or(0)
    }

    /// Reserves all of `bytes`, or nothing.
    ///
    /// # Errors
    ///
    /// The limit that is reached; the owner's own before the total.
    pub fn reserve(&mut self, owner: BodyOwner, bytes: usize) -> Result<(), BudgetExceeded> {
        let connection = owner.connection.and_then(|key| self.connections.get(&key)).copied().unwrap_or(0);
        let tenant = owner.tenant.and_then(|key| self.tenants.get(&key)).copied().unwrap_or(0);
        let exceeds = |used: usize, limit: usize| used.saturating_add(bytes) > limit;
        if owner.connection.is_some() && exceeds(connection, self.limits.per_connection) {
            return Err(BudgetExceeded::Connection);
        }
        if owner.tenant.is_some() && exceeds(tenant, self.limits.per_tenant) {
            return Err(BudgetExceeded::Tenant);
        }
        if exceeds(self.used, self.limits.total) {
            return Err(BudgetExceeded::Total);
        }
        self.used += bytes;
        if let Some(key) = owner.connection {
            *self.connections.entry(key).or_default() += bytes;
        }
        if let Some(key) = owner.tenant {
            *self.tenants.entry(key).or_default() += bytes;
        }
        Ok(())
    }

    /// Releases `bytes` that the same owner has reserved.
    pub fn release(&mut self, owner: BodyOwner, bytes: usize) {
        self.used = self.used.saturating_sub(bytes);
        if let Some(key) = owner.connection {
            release(&mut self.connections, key, bytes);
        }
        if let Some(key) = owner.tenant {
            release(&mut self.tenants, key, bytes);
        }
    }
}

fn release<K: Ord>(used: &mut BTreeMap<K, usize>, key: K, bytes: usize) {
    if let Some(bytes_used) = used.get_mut(&key) {
        *bytes_used = bytes_used.saturating_sub(bytes);
        if *bytes_used == 0 {
            used.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { total: 100, per_tenant: 40, per_connection: 30 };

    fn owner(tenant: usize, port: u16) -> BodyOwner {
        BodyOwner { tenant: Some(tenant), connection: Some(SocketAddr::from(([127, 0, 0, 1], port))) }
    }

    #[test]
    fn each_limit_holds_and_one_byte_past_it_is_rejected_with_the_limit() {
        let mut budget = Budget::new(LIMITS);
        assert_eq!(budget.reserve(owner(0, 1), 30), Ok(()));
        assert_eq!(budget.reserve(owner(0, 1), 1), Err(BudgetExceeded::Connection));
        assert_eq!(budget.reserve(owner(0, 2), 10), Ok(()));
        assert_eq!(budget.reserve(owner(0, 3), 1), Err(BudgetExceeded::Tenant));
        assert_eq!(budget.reserve(owner(1, 4), 30), Ok(()), "another tenant has its own");
        assert_eq!(budget.reserve(owner(2, 5), 30), Ok(()));
        assert_eq!(budget.reserve(owner(3, 6), 1), Err(BudgetExceeded::Total));
        assert_eq!((budget.used(), budget.largest_tenant()), (100, 40));
        let whole = BodyOwner { tenant: None, connection: None };
        budget.release(owner(1, 4), 30);
        assert_eq!(budget.reserve(whole, 30), Ok(()), "counted by another process, only the total applies");
    }

    #[test]
    fn released_bytes_leave_no_state() {
        let mut budget = Budget::new(LIMITS);
        for port in 0..1000 {
            assert_eq!(budget.reserve(owner(usize::from(port), port), 30), Ok(()));
            budget.release(owner(usize::from(port), port), 10);
            budget.release(owner(usize::from(port), port), 20);
        }
        assert_eq!((budget.used(), budget.tenants.len(), budget.connections.len()), (0, 0, 0));
    }

    #[test]
    fn a_rejected_reservation_reserves_nothing() {
        let mut budget = Budget::new(LIMITS);
        assert_eq!(budget.reserve(owner(0, 1), usize::MAX), Err(BudgetExceeded::Connection));
        assert_eq!((budget.used(), budget.tenants.len(), budget.connections.len()), (0, 0, 0));
    }
}
