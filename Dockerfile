# taskmesh with its command line and dashboard, without a database of its own. See docker-compose.yml.
FROM python:3.11-slim

WORKDIR /taskmesh
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY taskmesh taskmesh
RUN pip install --no-cache-dir --constraint constraints.txt '.[cli,web,metrics,cron,speed,process,tracing,encryption]' \
    && useradd --create-home --uid 65532 worker

# By its number: Kubernetes does not let a pod run whose user it cannot tell from root.
USER 65532
WORKDIR /app
# Log lines at once, not when a buffer is full. The code is mounted read-only, so no .pyc beside it.
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
ENTRYPOINT ["taskmesh"]
CMD ["--help"]
