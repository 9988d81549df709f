//! Memory budget of request bodies: how much all of them may take, and of that one tenant and one connection.
//!
//! A body is counted as it arrives, never by the length that it declares: a declaration costs a client nothing. What one
//! tenant or one connection may take is a part of the whole, so that whoever fills it is refused and others are not.

use std::collections::BTreeMap;
use std::net::SocketAddr;

/// Bytes that bodies may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// All of them together.
    pub total: usize,
    /// Those of one tenant.
    pub per_tenant: usize,
    /// Those that came over one connection.
    pub per_connection: usize,
}

/// Owner of a body: tenant and connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Owner {
    /// The place of its tenant; none where another process has counted it.
    pub tenant: Option<usize>,
    /// The client's end of its connection; none where the connection carries the requests of many.
    pub connection: Option<SocketAddr>,
}

/// Which limit is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Full {
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
    /// Nothing is taken yet.
    pub fn new(limits: Limits) -> Budget {
        Budget { limits, used: 0, tenants: BTreeMap::new(), connections: BTreeMap::new() }
    }

    /// The limits.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Bytes that are taken.
    pub fn used(&self) -> usize {
        self.used
    }

    /// Bytes that the tenant with most of them has taken.
    pub fn largest_tenant(&self) -> usize {
        self.tenants.values().copied().max().unwrap_or(0)
    }

    /// Takes `bytes` more, or nothing.
    ///
    /// # Errors
    ///
    /// The limit that is reached; the owner's own before that of all.
    pub fn reserve(&mut self, owner: Owner, bytes: usize) -> Result<(), Full> {
        let connection = owner.connection.and_then(|key| self.connections.get(&key)).copied().unwrap_or(0);
        let tenant = owner.tenant.and_then(|key| self.tenants.get(&key)).copied().unwrap_or(0);
        let exceeds = |used: usize, limit: usize| used.saturating_add(bytes) > limit;
        if owner.connection.is_some() && exceeds(connection, self.limits.per_connection) {
            return Err(Full::Connection);
        }
        if owner.tenant.is_some() && exceeds(tenant, self.limits.per_tenant) {
            return Err(Full::Tenant);
        }
        if exceeds(self.used, self.limits.total) {
            return Err(Full::Total);
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

    /// Gives back `bytes` that the same owner has taken.
    pub fn release(&mut self, owner: Owner, bytes: usize) {
        self.used = self.used.saturating_sub(bytes);
        if let Some(key) = owner.connection {
            release(&mut self.connections, key, bytes);
        }
        if let Some(key) = owner.tenant {
            release(&mut self.tenants, key, bytes);
        }
    }
}

fn release<K: Ord>(taken: &mut BTreeMap<K, usize>, key: K, bytes: usize) {
    if let Some(left) = taken.get_mut(&key) {
        *left = left.saturating_sub(bytes);
        if *left == 0 {
            taken.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { total: 100, per_tenant: 40, per_connection: 30 };

    fn owner(tenant: usize, port: u16) -> Owner {
        Owner { tenant: Some(tenant), connection: Some(SocketAddr::from(([127, 0, 0, 1], port))) }
    }

    #[test]
    fn each_limit_holds_and_one_byte_past_it_is_refused_by_its_name() {
        let mut budget = Budget::new(LIMITS);
        assert_eq!(budget.reserve(owner(0, 1), 30), Ok(()));
        assert_eq!(budget.reserve(owner(0, 1), 1), Err(Full::Connection));
        assert_eq!(budget.reserve(owner(0, 2), 10), Ok(()));
        assert_eq!(budget.reserve(owner(0, 3), 1), Err(Full::Tenant));
        assert_eq!(budget.reserve(owner(1, 4), 30), Ok(()), "another tenant has its own");
        assert_eq!(budget.reserve(owner(2, 5), 30), Ok(()));
        assert_eq!(budget.reserve(owner(3, 6), 1), Err(Full::Total));
        assert_eq!((budget.used(), budget.largest_tenant()), (100, 40));
        let whole = Owner { tenant: None, connection: None };
        budget.release(owner(1, 4), 30);
        assert_eq!(budget.reserve(whole, 30), Ok(()), "counted elsewhere, it has the total alone to keep to");
    }

    #[test]
    fn what_is_given_back_is_forgotten() {
        let mut budget = Budget::new(LIMITS);
        for port in 0..1000 {
            assert_eq!(budget.reserve(owner(usize::from(port), port), 30), Ok(()));
            budget.release(owner(usize::from(port), port), 10);
            budget.release(owner(usize::from(port), port), 20);
        }
        assert_eq!((budget.used(), budget.tenants.len(), budget.connections.len()), (0, 0, 0));
    }

    #[test]
    fn a_refusal_takes_nothing() {
        let mut budget = Budget::new(LIMITS);
        assert_eq!(budget.reserve(owner(0, 1), usize::MAX), Err(Full::Connection));
        assert_eq!((budget.used(), budget.tenants.len(), budget.connections.len()), (0, 0, 0));
    }
}
