//! A real etcd, of one member or of several, for hubs that are not all on one machine.
//!
//! etcd keeps what it promises; it is the way there that fails. A member hangs and its connection stays open; one of three
//! is dead and every now and then it is the one that is asked; a leader is gone and for a second nobody answers; a watch
//! ends, or goes on and is silent for ever. So there is one place where a call is tried again (here), one where members are
//! chosen (`members`), and one where a watch is held and taken up anew (`watch`).
//!
//! A call is tried again on another member until [`CALL_BUDGET`] is spent, whatever it was. That is sound for what the
//! store's callers do: reads, transactions guarded by what they stand on, puts of a whole value, leases that end by
//! themselves if they were granted twice. It means that a guard may fail for the sake of one's own first try, so that who
//! is told so looks before believing it.
//!
//! All keys have a prefix here, so that one etcd can serve several worlds and other things beside.

mod members;
mod nouns;
mod watch;

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use etcd_client::{
    Certificate, Client, CompactionOptions, ConnectOptions, Error, GetOptions, Identity, KvClient,
    LeaseTimeToLiveOptions, TlsOptions,
};
use tokio::time::timeout;

use crate::model::{KeyValue, Lease, Range, StoreError, Txn, TxnOutcome};
use crate::store::Store;
use members::{Members, pause};
use nouns::Keys;
pub use watch::EtcdWatch;

/// How long one member may take over one call. An fsync on a busy disk takes a tenth of it.
const CALL_LIMIT: Duration = Duration::from_secs(2);
/// How long a call is tried. etcd chooses a leader within 1.7 s of the last one's death, and the first try may have been
/// lost on a member that hangs.
pub const CALL_BUDGET: Duration = Duration::from_secs(6);
/// How long a connection may take to come about.
const CONNECT_LIMIT: Duration = Duration::from_millis(500);
/// Between two signs of life that are asked of a connection. etcd takes more than one in five seconds for an attack and
/// closes the connection, unless it is told otherwise (`--grpc-keepalive-min-time`); so this is the least that any etcd
/// takes, with a second for the two clocks.
pub const KEEP_ALIVE: Duration = Duration::from_secs(6);
/// How long a sign of life may be awaited.
const KEEP_ALIVE_LIMIT: Duration = Duration::from_secs(2);
/// Bytes of one answer: everything under a prefix, or all changes since a watch was last there. 64 regions with eight
/// spokes each and a thousand deployments ready on each come to 20 MB.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// Where an etcd is and how it is spoken to.
#[derive(Clone, Debug)]
pub struct EtcdConfig {
    /// Its members, each as `http://HOST:PORT` or `https://HOST:PORT`.
    pub endpoints: Vec<String>,
    /// What all keys begin with; not empty.
    pub prefix: String,
    /// Between two signs of life of a connection: [`KEEP_ALIVE`], unless the members were told to take more.
    pub keep_alive: Duration,
    /// Whom it takes us for.
    pub user: Option<EtcdUser>,
    /// For `https` endpoints.
    pub tls: Option<EtcdTls>,
}

/// A user of etcd.
#[derive(Clone)]
pub struct EtcdUser {
    /// The name.
    pub name: String,
    /// The password.
    pub password: String,
}

impl std::fmt::Debug for EtcdUser {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EtcdUser").field("name", &self.name).finish_non_exhaustive()
    }
}

/// By what an etcd is known, and by what it knows us.
#[derive(Clone)]
pub struct EtcdTls {
    /// Whose signature its certificate has to have, as PEM.
    pub authority: Vec<u8>,
    /// Our own certificate and its key, as PEM, where it asks for one.
    pub identity: Option<(Vec<u8>, Vec<u8>)>,
}

impl std::fmt::Debug for EtcdTls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EtcdTls").field("identity", &self.identity.is_some()).finish_non_exhaustive()
    }
}

/// A store in etcd. Clones are handles of the same one.
#[derive(Clone)]
pub struct Etcd {
    members: Arc<Members>,
    keys: Keys,
}

impl Etcd {
    /// The store in this etcd. Nobody is asked anything yet, so it makes no difference whether it is there.
    pub fn new(config: EtcdConfig) -> Etcd {
        let EtcdConfig { endpoints, prefix, keep_alive, user, tls } = config;
        let mut options = ConnectOptions::new()
            .with_connect_timeout(CONNECT_LIMIT)
            .with_keep_alive(keep_alive, KEEP_ALIVE_LIMIT)
            .with_keep_alive_while_idle(true)
            // A member without a quorum otherwise says nothing, for as long as one likes to listen.
            .with_require_leader(true);
        if let Some(EtcdUser { name, password }) = user {
            options = options.with_user(name, password).with_auto_token_refresh(true);
        }
        if let Some(EtcdTls { authority, identity }) = tls {
            let mut tls = TlsOptions::new().ca_certificate(Certificate::from_pem(authority));
            if let Some((certificate, key)) = identity {
                tls = tls.identity(Identity::from_pem(certificate, key));
            }
            options = options.with_tls(tls);
        }
        Etcd { members: Arc::new(Members::new(endpoints, options)), keys: Keys::under(prefix) }
    }

    /// Forgets all history before the present revision, as etcd does by itself when it is told to
    /// (`--auto-compaction-retention`).
    ///
    /// # Errors
    ///
    /// As of every call.
    pub async fn compact(&self) -> Result<(), StoreError> {
        let Range { revision, .. } = self.range("").await?;
        let outcome = self
            .call(|client| async move {
                let options = CompactionOptions::new().with_physical();
                kv(&client).compact(nouns::signed(revision), Some(options)).await
            })
            .await;
        match outcome {
            Ok(_) => Ok(()),
            // Somebody else was faster.
            Err(Failure::Refused(error)) if nouns::is_compacted(&error) => Ok(()),
            Err(failure) => Err(failure.into()),
        }
    }

    /// etcd says that a lease which a transaction names does not stand, and not which.
    async fn which_is_lost(&self, txn: &Txn, said: Error) -> StoreError {
        for lease in nouns::leases_of(txn) {
            let id = nouns::signed(lease.0);
            let ask = |client: Client| async move { client.lease_client().time_to_live(id, None).await };
            match self.call(ask).await {
                Ok(answer) if answer.ttl() > 0 => {}
                Ok(_) => return StoreError::NoSuchLease(lease),
                Err(failure) => return failure.into(),
            }
        }
        StoreError::Unavailable(said.to_string())
    }

    /// Tries a call until it is answered or its time is over.
    async fn call<T, F>(&self, work: impl Fn(Client) -> F + Send + Sync) -> Result<T, Failure>
    where
        T: Send,
        F: Future<Output = Result<T, Error>> + Send,
    {
        let begun = Instant::now();
        let mut tries = 0;
        loop {
            let (member, outcome) = self.ask_one(&work).await;
            let problem = match outcome {
                Ok(answer) => return Ok(answer),
                Err(Failure::Refused(error)) => return Err(Failure::Refused(error)),
                Err(Failure::NoAnswer(problem)) => problem,
            };
            self.members.failed(member);
            tries += 1;
            if begun.elapsed() + pause(tries) > CALL_BUDGET {
                return Err(Failure::NoAnswer(problem));
            }
            tokio::time::sleep(pause(tries)).await;
        }
    }

    /// Asks the member of the moment, once.
    async fn ask_one<T, F>(&self, work: &(impl Fn(Client) -> F + Sync)) -> (usize, Result<T, Failure>)
    where
        F: Future<Output = Result<T, Error>> + Send,
    {
        let member = self.members.current();
        let asked = timeout(CALL_LIMIT, async { work(self.members.client(member).await?).await }).await;
        let outcome = match asked {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(error)) if nouns::is_final(&error) => Err(Failure::Refused(error)),
            Ok(Err(error)) => Err(Failure::NoAnswer(error.to_string())),
            Err(_) => Err(Failure::NoAnswer(format!(
                "{} has not answered within {CALL_LIMIT:?}",
                self.members.endpoint(member)
            ))),
        };
        (member, outcome)
    }
}

/// Why there is no answer to work with.
enum Failure {
    /// etcd has understood, and says no.
    Refused(Error),
    /// Nobody knows what became of it.
    NoAnswer(String),
}

impl From<Failure> for StoreError {
    fn from(failure: Failure) -> StoreError {
        match failure {
            Failure::Refused(error) => StoreError::Unavailable(error.to_string()),
            Failure::NoAnswer(problem) => StoreError::Unavailable(problem),
        }
    }
}

impl Failure {
    /// The error of a call that is about this lease.
    fn about(self, lease: Lease) -> StoreError {
        match &self {
            Failure::Refused(error) if nouns::is_no_such_lease(error) => StoreError::NoSuchLease(lease),
            Failure::Refused(_) | Failure::NoAnswer(_) => self.into(),
        }
    }
}

fn kv(client: &Client) -> KvClient {
    client.kv_client().max_decoding_message_size(ANSWER_BYTES_MAX)
}

impl Store for Etcd {
    type Watch = EtcdWatch;

    async fn get(&self, key: &str) -> Result<Option<KeyValue>, StoreError> {
        let key = &self.keys.outer(key);
        let mut answer = self.call(|client| async move { kv(&client).get(key.clone(), None).await }).await?;
        Ok(answer.take_kvs().pop().map(|entry| self.keys.entry(&entry)))
    }

    async fn range(&self, prefix: &str) -> Result<Range, StoreError> {
        let prefix = &self.keys.outer(prefix);
        let mut answer = self
            .call(|client| async move {
                kv(&client).get(prefix.clone(), Some(GetOptions::new().with_prefix())).await
            })
            .await?;
        let revision = nouns::revision(answer.header());
        let entries = answer.take_kvs().iter().map(|entry| self.keys.entry(entry)).collect();
        Ok(Range { entries, revision })
    }

    async fn txn(&self, txn: Txn) -> Result<TxnOutcome, StoreError> {
        txn.refuse_malformed()?;
        let theirs = &self.keys.txn(&txn);
        let answer = match self.call(|client| async move { kv(&client).txn(theirs.clone()).await }).await {
            Ok(answer) => answer,
            Err(Failure::Refused(error)) if nouns::is_no_such_lease(&error) => {
                return Err(self.which_is_lost(&txn, error).await);
            }
            Err(failure) => return Err(failure.into()),
        };
        Ok(TxnOutcome { succeeded: answer.succeeded(), revision: nouns::revision(answer.header()) })
    }

    fn watch(&self, prefix: &str, from: u64) -> EtcdWatch {
        EtcdWatch::start(self.members.clone(), self.keys.clone(), prefix.to_owned(), from)
    }

    async fn lease_grant(&self, ttl: Duration, _: Instant) -> Result<Lease, StoreError> {
        let seconds = nouns::whole_seconds(ttl);
        let grant = |client: Client| async move { client.lease_client().grant(seconds, None).await };
        let granted = self.call(grant).await?;
        Ok(Lease(nouns::unsigned(granted.id())))
    }

    async fn lease_keep_alive(&self, lease: Lease, _: Instant) -> Result<Vec<String>, StoreError> {
        let id = nouns::signed(lease.0);
        let keys = self
            .call(|client| async move {
                // A stream for one word: keepers that live longer end with their connection and nobody is told.
                client.lease_client().keep_alive(id).await?;
                let options = LeaseTimeToLiveOptions::new().with_keys();
                client.lease_client().time_to_live(id, Some(options)).await
            })
            .await
            .map_err(|failure| failure.about(lease))?;
        // It ended between the two questions.
        if keys.ttl() <= 0 {
            return Err(StoreError::NoSuchLease(lease));
        }
        Ok(keys.keys().iter().map(|key| self.keys.inner(key)).collect())
    }

    async fn lease_revoke(&self, lease: Lease) -> Result<(), StoreError> {
        let id = nouns::signed(lease.0);
        let revoke = |client: Client| async move { client.lease_client().revoke(id).await };
        self.call(revoke).await.map(drop).map_err(|failure| failure.about(lease))
    }

    async fn expire(&self, _: Instant) -> Result<Vec<Lease>, StoreError> {
        Ok(Vec::new())
    }
}
