//! A Python package index and a Hugging Face hub on loopback, which misbehave as they are told.
//!
//! Each path has its content and a list of moods: the first request meets the first mood, and so on; when they are used
//! up, everybody is served well. Every request is written down.

use std::collections::{BTreeMap, VecDeque};
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;

use replica::cache::Origins;

/// How a request is met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mood {
    /// The connection is closed after so many bytes of the file.
    CutAfter(usize),
    /// Nothing more is sent after so many bytes of the file, until [`Origin::release`].
    HoldAfter(usize),
    /// The range that was asked for is ignored, and all of it sent.
    IgnoreRange,
}

/// A request that came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Asked {
    pub(crate) path: String,
    /// The first byte that was asked for, where not all were.
    pub(crate) from: Option<usize>,
    pub(crate) authorization: Option<String>,
}

struct Served {
    content_type: &'static str,
    body: Vec<u8>,
    moods: VecDeque<Mood>,
}

#[derive(Default)]
struct World {
    served: BTreeMap<String, Served>,
    asked: Vec<Asked>,
    released: bool,
}

/// The server; it ends with the test's process.
pub(crate) struct Origin {
    address: SocketAddr,
    world: Arc<(Mutex<World>, Condvar)>,
}

impl Origin {
    pub(crate) fn start() -> Origin {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("its address");
        let world: Arc<(Mutex<World>, Condvar)> = Arc::default();
        let shared = Arc::clone(&world);
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (stream, world) = (stream.expect("a connection"), Arc::clone(&shared));
                // A client that goes away in the middle is part of the play.
                thread::spawn(move || serve(&stream, &world).ok());
            }
        });
        Origin { address, world }
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// It is both the index and the hub.
    pub(crate) fn origins(&self) -> Origins {
        origins(self.address)
    }

    pub(crate) fn serve(
        &self,
        path: &str,
        content_type: &'static str,
        body: impl Into<Vec<u8>>,
        moods: &[Mood],
    ) {
        let served = Served { content_type, body: body.into(), moods: moods.iter().copied().collect() };
        self.world.0.lock().expect("the world").served.insert(path.to_owned(), served);
    }

    /// The requests for `path` so far.
    pub(crate) fn asked(&self, path: &str) -> Vec<Asked> {
        let world = self.world.0.lock().expect("the world");
        world.asked.iter().filter(|asked| asked.path == path).cloned().collect()
    }

    /// Waits until `path` has been asked for.
    pub(crate) fn wait_for(&self, path: &str) {
        let world = self.world.0.lock().expect("the world");
        let nobody_asked = |world: &mut World| !world.asked.iter().any(|asked| asked.path == path);
        drop(self.world.1.wait_while(world, nobody_asked).expect("the world"));
    }

    /// Lets go of every connection that is held.
    pub(crate) fn release(&self) {
        self.world.0.lock().expect("the world").released = true;
        self.world.1.notify_all();
    }
}

fn origins(address: SocketAddr) -> Origins {
    Origins {
        pypi_index: format!("http://{address}/simple").parse().expect("a URL"),
        hf_endpoint: format!("http://{address}").parse().expect("a URL"),
        hf_token: Some("secret".to_owned()),
    }
}

/// Origins at an address where nobody listens.
pub(crate) fn nobody() -> Origins {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    origins(listener.local_addr().expect("its address"))
}

fn serve(mut stream: &TcpStream, (world, changed): &(Mutex<World>, Condvar)) -> std::io::Result<()> {
    let Some(asked) = read_request(stream)? else { return Ok(()) };
    let from = asked.from;
    let path = asked.path.split('?').next().unwrap_or_default().to_owned();
    let (content_type, body, mood) = {
        let mut world = world.lock().expect("the world");
        world.asked.push(Asked { path: path.clone(), ..asked });
        changed.notify_all();
        match world.served.get_mut(&path) {
            Some(served) => (served.content_type, served.body.clone(), served.moods.pop_front()),
            None => {
                return stream
                    .write_all(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
            }
        }
    };
    let total = body.len();
    let from = from.filter(|_| mood != Some(Mood::IgnoreRange));
    let rest = body.get(from.unwrap_or(0)..).unwrap_or_default();
    let status = match from {
        Some(from) if from >= total => {
            let head = format!("HTTP/1.1 416 Range Not Satisfiable\r\ncontent-range: bytes */{total}\r\n");
            return stream
                .write_all(format!("{head}content-length: 0\r\nconnection: close\r\n\r\n").as_bytes());
        }
        Some(from) => format!("206 Partial Content\r\ncontent-range: bytes {from}-{}/{total}", total - 1),
        None => "200 OK".to_owned(),
    };
    let length = rest.len();
    let head = format!("HTTP/1.1 {status}\r\ncontent-type: {content_type}\r\ncontent-length: {length}\r\n");
    stream.write_all(format!("{head}connection: close\r\n\r\n").as_bytes())?;
    match mood {
        None | Some(Mood::IgnoreRange) => stream.write_all(rest),
        Some(Mood::CutAfter(bytes)) => stream.write_all(&rest[..bytes.min(length)]),
        Some(Mood::HoldAfter(bytes)) => {
            let (now, later) = rest.split_at(bytes.min(length));
            stream.write_all(now)?;
            let world = world.lock().expect("the world");
            drop(changed.wait_while(world, |world| !world.released).expect("the world"));
            stream.write_all(later)
        }
    }
}

fn read_request(stream: &TcpStream) -> std::io::Result<Option<Asked>> {
    let mut lines = BufReader::new(stream).lines();
    let Some(first) = lines.next().transpose()? else { return Ok(None) };
    let path = first.split(' ').nth(1).unwrap_or_default().to_owned();
    let mut asked = Asked { path, from: None, authorization: None };
    for line in lines {
        let line = line?;
        let Some((name, value)) = line.split_once(": ") else { break };
        match name.to_ascii_lowercase().as_str() {
            "range" => {
                asked.from =
                    value.strip_prefix("bytes=").and_then(|range| range.strip_suffix('-')?.parse().ok())
            }
            "authorization" => asked.authorization = Some(value.to_owned()),
            _ => {}
        }
    }
    Ok(Some(asked))
}
